// Log likelihoods and their derivatives with respect to the outputs of a network.
#pragma once

#include "api.h"
#include "layout.h"
#include "vectors.h"

namespace {

constexpr double HALF_LOG_TWO_PI = 0.91893853320467274178;

// Overwrites the outputs `f` of a tile with the derivatives of its log likelihood. Returns the log likelihood if
// `value` is set. Adds the derivative with respect to a learned log scale to `gradient`.
template <class T>
double likelihood(const Data<T>& data, const T* theta, T* f, int64_t first, int64_t rows, bool value, T* gradient) {
  const int64_t valid = data.rows - first < rows ? data.rows - first : rows, K = data.targets;
  const T w = T(data.weight);
  const T* row_weight = data.row_weight ? data.row_weight + first : nullptr;
  const auto weight_of = [row_weight](int64_t r) { return row_weight ? double(row_weight[r]) : 1.0; };
  double count = double(valid);  // of the rows, each by its weight
  if (row_weight) {
    count = 0;
    for (int64_t r = 0; r < valid; ++r) count += double(row_weight[r]);
  }
  double sum = 0;
  double shared_derivative = 0;  // with respect to a log scale that all targets share
  for (int64_t k = 0; k < K && data.kind != CATEGORICAL; ++k) {
    const T* y = data.y + k * data.padded + first;
    T* out = f + k * PITCH;
    if (data.kind == GAUSSIAN) {
      const bool learned = data.log_scale >= 0;
      const int64_t offset = data.log_scale + (data.per_target ? k : 0);
      const double log_scale = learned ? double(theta[offset]) : std::log(data.scale[k]);
      const double precision = std::exp(-2 * log_scale);
      const T factor = w * T(precision);
      double squares[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if ((value || learned) && row_weight) {
        for (int64_t r = 0; r < valid; ++r) {
          const double residual = double(y[r]) - double(out[r]);
          squares[0] += weight_of(r) * residual * residual;
        }
      } else if (value || learned) {
        int64_t r = 0;
        for (; r + 8 <= valid; r += 8)
          for (int h = 0; h < 8; ++h) {
            const double residual = double(y[r + h]) - double(out[r + h]);
            squares[h] += residual * residual;
          }
        for (; r < valid; ++r) squares[0] += (double(y[r]) - double(out[r])) * (double(y[r]) - double(out[r]));
      }
      for (int64_t r = 0; r < rows; ++r) out[r] = r < valid ? (y[r] - out[r]) * factor : T(0);
      double square = 0;
      for (double part : squares) square += part;
      square *= precision;
      sum += -0.5 * square - count * (log_scale + HALF_LOG_TWO_PI);
      const double derivative = (square - count) * data.weight;
      if (learned && data.per_target) gradient[offset] += T(derivative);
      if (learned && !data.per_target) shared_derivative += derivative;
    } else if (data.kind == HETEROSCEDASTIC) {
      T* log_variance = f + (K + k) * PITCH;
      constexpr int L = Lanes<T>::N;
      const T floor = T(data.scale[k] * data.scale[k]);
      for (int64_t r = 0; floor > T(0) && r < rows; r += L) {
        const Vec<T> v = *(Vec<T>*)(log_variance + r), residual = *(const Vec<T>*)(y + r) - *(Vec<T>*)(out + r);
        // Beyond this limit float32 would overflow.
        const Vec<T> largest = broadcast(T(80)), own = vexp(v > largest ? largest : v), variance = own + floor;
        const Vec<T> scaled = residual / variance, square = residual * scaled;
        if (value)
          for (int h = 0; h < L && r + h < valid; ++h)
            sum += weight_of(r + h) * (-0.5 * (double(square[h]) + std::log(double(variance[h]))) - HALF_LOG_TWO_PI);
        *(Vec<T>*)(out + r) = w * scaled;
        *(Vec<T>*)(log_variance + r) = (T(0.5) * w) * (square - T(1)) * (own / variance);
      }
      for (int64_t r = 0; floor == T(0) && r < rows; r += L) {
        const Vec<T> v = *(Vec<T>*)(log_variance + r), residual = *(const Vec<T>*)(y + r) - *(Vec<T>*)(out + r);
        const Vec<T> inverse = vexp(-v), scaled = residual * inverse;
        const Vec<T> square = residual * scaled;
        if (value)
          for (int h = 0; h < L && r + h < valid; ++h)
            sum += weight_of(r + h) * (-0.5 * (double(square[h]) + double(v[h])) - HALF_LOG_TWO_PI);
        *(Vec<T>*)(out + r) = w * scaled;
        *(Vec<T>*)(log_variance + r) = (T(0.5) * w) * (square - T(1));
      }
      for (int64_t r = valid; r < rows; ++r) out[r] = log_variance[r] = T(0);
    } else {  // Bernoulli
      constexpr int L = Lanes<T>::N;
      if (value)
        for (int64_t r = 0; r < valid; ++r) {
          const double z = out[r];
          const double normaliser = z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z));
          sum += weight_of(r) * (double(y[r]) * z - normaliser);
        }
      for (int64_t r = 0; r < rows; r += L) {
        Vec<T>& z = *(Vec<T>*)(out + r);
        z = w * (*(const Vec<T>*)(y + r) - sigmoid<T>(z));
      }
      for (int64_t r = valid; r < rows; ++r) out[r] = T(0);
    }
  }
  if (data.kind == GAUSSIAN && data.log_scale >= 0 && !data.per_target)
    gradient[data.log_scale] += T(shared_derivative);
  if (data.kind == CATEGORICAL) {
    constexpr int L = Lanes<T>::N;
    const T* y = data.y + first;
    for (int64_t r = 0; r < rows; r += L) {
      Vec<T> largest = *(Vec<T>*)(f + r), normaliser = broadcast(T(0)), chosen = broadcast(T(0));
      const Vec<T> label = *(const Vec<T>*)(y + r);
      for (int64_t k = 1; k < K; ++k) {
        const Vec<T> z = *(Vec<T>*)(f + k * PITCH + r);
        largest = z > largest ? z : largest;
      }
      for (int64_t k = 0; k < K; ++k) {
        Vec<T>& z = *(Vec<T>*)(f + k * PITCH + r);
        const Vec<T> shifted = z - largest;
        chosen = label == T(k) ? shifted : chosen;
        z = vexp(shifted);
        normaliser += z;
      }
      if (value)
        for (int h = 0; h < L && r + h < valid; ++h)
          sum += weight_of(r + h) * (double(chosen[h]) - std::log(double(normaliser[h])));
      const Vec<T> normalised_weight = w / normaliser;
      for (int64_t k = 0; k < K; ++k) {
        Vec<T>& z = *(Vec<T>*)(f + k * PITCH + r);
        z = (label == T(k) ? broadcast(w) : broadcast(T(0))) - z * normalised_weight;
      }
    }
    for (int64_t k = 0; k < K; ++k)
      for (int64_t r = valid; r < rows; ++r) f[k * PITCH + r] = T(0);
  }
  if (row_weight) {
    const int64_t outputs = data.kind == HETEROSCEDASTIC ? 2 * K : K;
    for (int64_t k = 0; k < outputs; ++k)
      for (int64_t r = 0; r < valid; ++r) f[k * PITCH + r] *= row_weight[r];
  }
  return sum;
}

}  // namespace
