// The density of a regression network whose output weights are integrated out.
//
// The mean of y is linear in the output weights w: y = Phi w + noise of precision r, with the features Phi of the last
// hidden layer. Given the other parameters, w is Gaussian with precision A = Phi' R Phi + Lambda and mean
// alpha = A^-1 (Phi' R y + Lambda m), and the marginal likelihood of the other parameters is
//
//   1/2 sum log r - 1/2 (sum r e^2 + (alpha - m)' Lambda (alpha - m)) - 1/2 log |A| + 1/2 log |Lambda|,   e = y - Phi alpha
//
// with the derivatives r (e alpha - A^-1 phi) with respect to the features phi of a row. In a parameter vector, the
// places of w hold standardised weights xi instead: w = alpha + U' xi with A^-1 = U' U.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "api.h"
#include "layout.h"
#include "likelihood.h"
#include "memory.h"
#include "thread_pool.h"
#include "vectors.h"
#include "workspace.h"

namespace {

template <class T> class CollapsedOutput {
 public:
  CollapsedOutput(const Network& net, const Data<T>& data, const OutputPrior& prior, ThreadPool* pool)
      : net(net), hidden(net), data(data), prior(prior), pool(pool), length(tile_rows(data.padded)) {
    last = hidden.layers = net.layers - 1;
    H = net.inputs[last], F = H + (net.bias[last] >= 0 ? 1 : 0);
    tiles = (data.padded + length - 1) / length;
    for (int64_t t = 0; t < tiles; ++t) per_tile.emplace_back(new Tile(hidden, F));
    const int threads = pool ? pool->size() : 1;
    for (int g = 0; g < threads; ++g) scratch.emplace_back(new Scratch(F));
    A.resize(F * F), U.resize(F * F), rounded.resize(F * F);
    b.resize(F), alpha.resize(F), rounded_alpha.resize(F);
    if (pool) partial.resize(tiles * net.dim);
  }
  CollapsedOutput(const CollapsedOutput&) = delete;

  // Adds the gradient to `gradient`, which is zero. Returns the log of the marginal likelihood.
  double evaluate(const T* theta, T* gradient, bool value) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double normaliser = solve(theta);
    if (!(normaliser == normaliser)) {
      for (int64_t d = 0; d < net.dim; ++d) gradient[d] = T(nan);
      return nan;
    }
    each_tile([&](int thread, int64_t t) {
      T* own = pool ? partial.data() + t * net.dim : gradient;
      if (pool) std::memset(own, 0, net.dim * sizeof(T));
      per_tile[t]->sum = differentiate(*per_tile[t], *scratch[thread], t, theta, value, own);
    });
    double sum = normaliser;
    for (int64_t t = 0; t < tiles; ++t) {
      sum += per_tile[t]->sum;
      for (int64_t d = 0; pool && d < net.dim; ++d) gradient[d] += partial[t * net.dim + d];
    }
    return sum;
  }

  void decode(const T* standardised, T* theta) {
    solve(standardised);
    std::memcpy(theta, standardised, net.dim * sizeof(T));
    for (int64_t j = 0; j < F; ++j) {
      double weight = alpha[j];
      for (int64_t k = j; k < F; ++k) weight += U[k * F + j] * double(standardised[place(k)]);
      theta[place(j)] = T(weight);
    }
  }

 private:
  // What is kept of a tile between the two passes over the rows.
  struct Tile {
    Tile(const Network& hidden, int64_t features)
        : workspace(hidden), r(PITCH), own(PITCH), gram(features * features), moment(features) {}
    Workspace<T> workspace;
    std::vector<T> r, own;  // precision of every row, and the fraction of its variance that depends on parameters
    std::vector<double> gram, moment;
    double weights = 0, logs = 0, sum = 0;
  };
  struct Scratch {
    explicit Scratch(int64_t features) {
      const int64_t size = features * PITCH;
      wide = allocate_aligned<double>(2 * size + PITCH), narrow = allocate_aligned<T>(2 * size);
      features_double = wide.get(), weighted = features_double + size, y = weighted + size;
      whitened = narrow.get(), upstream = whitened + size;
    }
    Scratch(const Scratch&) = delete;
    Aligned<double> wide;
    Aligned<T> narrow;
    double *features_double, *weighted, *y;
    T *whitened, *upstream;
    alignas(64) T error[PITCH];
    alignas(64) T leverage[PITCH];
  };

  bool heteroscedastic() const { return data.kind == HETEROSCEDASTIC; }
  // The coordinate of the output weight of a feature.
  int64_t place(int64_t j) const { return j < H ? net.weight[last] + j : net.bias[last]; }

  template <class Task> void each_tile(Task task) {
    if (pool)
      pool->run(tiles, task);
    else
      for (int64_t t = 0; t < tiles; ++t) task(0, t);
  }

  // Computes A = R' R, U = R'^-1 and alpha. Returns the part of the marginal likelihood that is not a sum over rows,
  // or NaN if A is not positive definite.
  double solve(const T* theta) {
    each_tile([&](int thread, int64_t t) { accumulate(*per_tile[t], *scratch[thread], t, theta); });
    std::fill(A.begin(), A.end(), 0.0), std::fill(b.begin(), b.end(), 0.0);
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t k = 0; k < F * F; ++k) A[k] += per_tile[t]->gram[k];
      for (int64_t k = 0; k < F; ++k) b[k] += per_tile[t]->moment[k];
    }
    // The lower triangle was computed; the factorisation works on rows of the upper one.
    for (int64_t i = 0; i < F; ++i)
      for (int64_t j = i; j < F; ++j) A[i * F + j] = A[j * F + i];
    double logs = 0;
    for (int64_t j = 0; j < F; ++j) {
      A[j * F + j] += prior.precision[j], b[j] += prior.precision[j] * prior.loc[j];
      logs += 0.5 * std::log(prior.precision[j]);
    }
    if (!factorise()) return std::numeric_limits<double>::quiet_NaN();
    for (int64_t j = 0; j < F; ++j) logs -= std::log(A[j * F + j]);
    std::vector<double> half(F, 0.0);
    std::fill(alpha.begin(), alpha.end(), 0.0);
    for (int64_t i = 0; i < F; ++i)
      for (int64_t j = 0; j <= i; ++j) half[i] += U[i * F + j] * b[j];
    for (int64_t i = 0; i < F; ++i)
      for (int64_t j = 0; j <= i; ++j) alpha[j] += U[i * F + j] * half[i];
    double shift = 0;
    for (int64_t j = 0; j < F; ++j) {
      shift += prior.precision[j] * (alpha[j] - prior.loc[j]) * (alpha[j] - prior.loc[j]);
      rounded_alpha[j] = T(alpha[j]);
    }
    for (int64_t k = 0; k < F * F; ++k) rounded[k] = T(U[k]);
    return logs - 0.5 * shift;
  }

  // First pass: features, precisions and products of a tile.
  void accumulate(Tile& tile, Scratch& own, int64_t t, const T* theta) {
    const int64_t first = t * length, rows = data.padded - first < length ? data.padded - first : length;
    const int64_t valid = data.rows - first < rows ? data.rows - first : rows;
    tile.workspace.forward(data.x + first, data.padded, theta, rows, true);
    const T* phi = tile.workspace.values[last - 1];
    precisions(tile, own, phi, theta, first, rows, valid);
    for (int64_t j = 0; j < F; ++j) {
      double *to = own.features_double + j * PITCH, *scaled = own.weighted + j * PITCH;
      const T *from = phi + j * PITCH, *r = tile.r.data();
      for (int64_t i = 0; i < rows; ++i) {
        to[i] = j < H ? double(from[i]) : 1.0;
        scaled[i] = to[i] * double(r[i]);
      }
    }
    for (int64_t i = 0; i < rows; ++i) own.y[i] = i < valid ? double(data.y[first + i]) : 0.0;
    std::fill(tile.gram.begin(), tile.gram.end(), 0.0), std::fill(tile.moment.begin(), tile.moment.end(), 0.0);
    int64_t j = 0;
#define GRAM(J)                                                                                                \
  for (; j + J <= F; j += J) {                                                                                 \
    unit_products<double, J>(own.weighted + j * PITCH, own.features_double, PITCH, j + J, rows,                \
                             tile.gram.data() + j * F, F);                                                     \
    products<double, J, 1>(own.weighted + j * PITCH, own.y, PITCH, rows, tile.moment.data() + j, 1);           \
  }
    GRAM(4)
    GRAM(2)
    GRAM(1)
#undef GRAM
  }

  void precisions(Tile& tile, Scratch& own, const T* phi, const T* theta, int64_t first, int64_t rows, int64_t valid) {
    const T* row_weight = data.row_weight ? data.row_weight + first : nullptr;
    tile.weights = tile.logs = 0;
    double log_variance = 0;
    const double floor = data.scale[0] * data.scale[0];
    if (heteroscedastic())
      affine<T>(theta + net.weight[last] + H, H, 1, net.bias[last] < 0 ? nullptr : theta + net.bias[last] + 1, phi,
                PITCH, H, 1, rows, own.error, nullptr, NONE, nullptr);
    else
      log_variance = 2 * (data.log_scale >= 0 ? double(theta[data.log_scale]) : std::log(data.scale[0]));
    for (int64_t i = 0; i < rows; ++i) {
      const double weight = i < valid ? data.weight * (row_weight ? double(row_weight[i]) : 1.0) : 0.0;
      double variance = std::exp(log_variance), fraction = 1;
      if (heteroscedastic()) {
        // Beyond this limit float32 would overflow.
        const double part = std::exp(own.error[i] > T(80) ? 80.0 : double(own.error[i]));
        variance = part + floor, fraction = part / variance;
      }
      tile.r[i] = T(weight / variance), tile.own[i] = T(fraction);
      tile.weights += weight;
      if (weight > 0 && heteroscedastic()) tile.logs += weight * std::log(variance);
    }
    if (!heteroscedastic()) tile.logs = tile.weights * log_variance;
  }

  // Second pass: the gradient of a tile. Returns its part of the marginal likelihood if `value` is set.
  double differentiate(Tile& tile, Scratch& own, int64_t t, const T* theta, bool value, T* gradient) {
    const int64_t first = t * length, rows = data.padded - first < length ? data.padded - first : length;
    const T *phi = tile.workspace.values[last - 1], *derivative = tile.workspace.derivatives[last - 1];
    const T *r = tile.r.data(), *y = data.y + first, *u = rounded.data(), *mean = rounded_alpha.data();
    T *whitened = own.whitened, *upstream = own.upstream, *error = own.error, *leverage = own.leverage;
    // whitened = U phi, upstream = U' whitened. Both products skip the triangle of zeros.
    int64_t j = 0;
#define DOWN(J)                                                                                               \
  for (; j + J <= H; j += J)                                                                                  \
  units<T, J>(u + j * F, F, 1, nullptr, phi, PITCH, j + J, rows, whitened + j * PITCH, nullptr, NONE, nullptr)
    DOWN(UNIT_BLOCK);
    DOWN(4);
    DOWN(2);
    DOWN(1);
#undef DOWN
    if (F > H)
      units<T, 1>(u + H * F, F, 1, u + H * F + H, phi, PITCH, H, rows, whitened + H * PITCH, nullptr, NONE, nullptr);
    j = 0;
#define UP(J)                                                                                                      \
  for (; j + J <= H; j += J)                                                                                       \
  units<T, J>(u + j * F + j, 1, F, nullptr, whitened + j * PITCH, PITCH, F - j, rows, upstream + j * PITCH, nullptr, \
              NONE, nullptr)
    UP(UNIT_BLOCK);
    UP(4);
    UP(2);
    UP(1);
#undef UP
    for (int64_t i = 0; i < rows; ++i) error[i] = y[i] - (F > H ? mean[H] : T(0)), leverage[i] = T(0);
    for (int64_t k = 0; k < F; ++k) {
      const T *w = whitened + k * PITCH, *f = phi + k * PITCH;
      for (int64_t i = 0; i < rows; ++i) leverage[i] += w[i] * w[i];
      if (k < H)
        for (int64_t i = 0; i < rows; ++i) error[i] -= mean[k] * f[i];
    }
    double sum = 0, derivative_sum = -tile.weights;
    for (int64_t i = 0; i < rows; ++i) {
      const double square = double(r[i]) * double(error[i]) * double(error[i]);
      sum += square, derivative_sum += square + double(r[i]) * double(leverage[i]);
    }
    if (data.log_scale >= 0 && !heteroscedastic()) gradient[data.log_scale] += T(derivative_sum);
    const T* head = theta + net.weight[last] + H;
    if (heteroscedastic()) noise_head(tile, own, first, rows, gradient);
    for (int64_t k = 0; k < H; ++k) {
      T* to = upstream + k * PITCH;
      const T *slope = derivative + k * PITCH, *noise = leverage;
      if (heteroscedastic())
        for (int64_t i = 0; i < rows; ++i)
          to[i] = (r[i] * (error[i] * mean[k] - to[i]) + noise[i] * head[k]) * slope[i];
      else
        for (int64_t i = 0; i < rows; ++i) to[i] = r[i] * (error[i] * mean[k] - to[i]) * slope[i];
    }
    tile.workspace.backward(data.x + first, data.padded, theta, upstream, rows, gradient);
    return value ? -0.5 * (sum + tile.logs) - tile.weights * HALF_LOG_TWO_PI : 0.0;
  }

  // Overwrites the leverages with the derivatives with respect to the log variances, and adds the gradient of the head
  // that predicts them.
  void noise_head(Tile& tile, Scratch& own, int64_t first, int64_t rows, T* gradient) {
    const T *row_weight = data.row_weight ? data.row_weight + first : nullptr, *r = tile.r.data();
    for (int64_t i = 0; i < rows; ++i) {
      const T weight = T(data.weight) * (row_weight ? row_weight[i] : T(1));
      const T part = r[i] * (own.error[i] * own.error[i] + own.leverage[i]) - (r[i] > T(0) ? weight : T(0));
      own.leverage[i] = T(0.5) * tile.own[i] * part;
    }
    weight_gradient<T>(own.leverage, 1, tile.workspace.values[last - 1], PITCH, H, rows, gradient + net.weight[last] + H);
    if (net.bias[last] >= 0) row_sums<T, 1>(own.leverage, rows, gradient + net.bias[last] + 1);
  }

  // Overwrites the upper triangle of A with R, and computes U.
  bool factorise() {
    for (int64_t k = 0; k < F; ++k) {
      double* row = A.data() + k * F;
      if (!(row[k] > 0) || !(row[k] <= std::numeric_limits<double>::max())) return false;
      const double scale = 1 / std::sqrt(row[k]);
      for (int64_t j = k; j < F; ++j) row[j] *= scale;
      for (int64_t i = k + 1; i < F; ++i) {
        double* below = A.data() + i * F;
        const double factor = row[i];
        for (int64_t j = i; j < F; ++j) below[j] -= factor * row[j];
      }
    }
    std::fill(U.begin(), U.end(), 0.0);
    for (int64_t i = 0; i < F; ++i) {
      double* row = U.data() + i * F;
      for (int64_t k = 0; k < i; ++k) {
        const double factor = A[k * F + i], *above = U.data() + k * F;
        for (int64_t j = 0; j <= k; ++j) row[j] -= factor * above[j];
      }
      const double scale = 1 / A[i * F + i];
      for (int64_t j = 0; j < i; ++j) row[j] *= scale;
      row[i] = scale;
    }
    return true;
  }

  const Network& net;
  Network hidden;  // without the output layer
  const Data<T>& data;
  const OutputPrior prior;
  ThreadPool* pool;
  int64_t length, tiles, last, H, F;
  std::vector<std::unique_ptr<Tile>> per_tile;
  std::vector<std::unique_ptr<Scratch>> scratch;
  std::vector<double> A, U, b, alpha;
  std::vector<T> rounded, rounded_alpha, partial;
};

}  // namespace
