// Steps of one chain or member on minibatches: SGLD and SGHMC, and training with or without dropout.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "chain.h"
#include "masks.h"
#include "network.h"
#include "team.h"

namespace {

// -- steps on minibatches -------------------------------------------------------------------------------------------------------
struct Steps {
  int64_t count, friction;     // whether there is a momentum: SGHMC, else SGLD
  const int64_t* rows;         // [step][chain][batch], or null for all rows in each
  int64_t batch;
  double scale;                // of a batch's likelihood to that of all rows
  const void* noise;           // [chain][step][dim], with so many numbers from one chain to the next
  int64_t noise_pitch;
  const double* figures;       // [step][4]: step size, heat, share of the momentum that is kept, unused
};

// A minibatch in columns of its own, and the density of one chain on it; all rows where there is none.
template <class T> class Batch {
 public:
  Batch(const Network& net, const Rows& data, const Prior& prior, bool some, int64_t size, double weight)
      : net(net), data(data), size(size), own(data) {
    own.weight = weight;
    targets = data.kind == CATEGORICAL ? 1 : data.targets;
    if (some) {
      const int64_t wide = (size + GRAIN - 1) / GRAIN * GRAIN;
      columns.assign((net.inputs[0] + targets) * wide + 64 / sizeof(T), T(0));
      T* aligned = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(columns.data()) + 63) / 64 * 64);
      own.count = size, own.padded = wide;
      own.x = x = aligned, own.y = y = aligned + net.inputs[0] * wide;
    }
    density.reset(new Chain<T>(net, own, prior, nullptr));
  }

  // The gradient of the log density, and the log likelihood of these rows where it is wanted.
  double evaluate(const T* theta, T* gradient, const int64_t* rows, bool value, const Masks<T>* masks = nullptr) {
    if (rows) {
      take(static_cast<const T*>(data.x), net.inputs[0], x, rows);
      take(static_cast<const T*>(data.y), targets, y, rows);
    }
    return density->evaluate(theta, gradient, value, masks);
  }
  int64_t padded() const { return own.padded; }

  const Network& net;

 private:
  void take(const T* from, int64_t count, T* to, const int64_t* rows) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < size; ++r) to[i * own.padded + r] = from[i * data.padded + rows[r]];
  }
  const Rows& data;
  int64_t size, targets;
  Rows own;
  std::vector<T> columns;
  T *x = nullptr, *y = nullptr;
  std::unique_ptr<Chain<T>> density;
};

template <class T>
void diffuse(Batch<T>& batch, const Steps& plan, int64_t D, int64_t chain, int64_t chains, T* theta, T* momentum, T* gradient,
             double* value) {
  for (int64_t k = 0; k < plan.count; ++k) {
    const double *figure = plan.figures + 4 * k, size = figure[0], kept = figure[2];
    const int64_t* rows = plan.rows ? plan.rows + (k * chains + chain) * plan.batch : nullptr;
    const T* noise = static_cast<const T*>(plan.noise) + chain * plan.noise_pitch + k * D;
    const T half = T(0.5 * size);
    const bool last = k + 1 == plan.count;
    double sum;
    if (plan.friction) {
      const T hold = T(kept), spread = T(std::sqrt(1 - kept * kept) * figure[1]);
      for (int64_t d = 0; d < D; ++d) {
        T m = momentum[d] + half * gradient[d];
        theta[d] += half * m;
        m = hold * m + spread * noise[d];
        theta[d] += half * m;
        momentum[d] = m;
      }
      sum = batch.evaluate(theta, gradient, rows, last);
      for (int64_t d = 0; d < D; ++d) momentum[d] += half * gradient[d];
    } else {
      const T spread = T(std::sqrt(size) * figure[1]);
      sum = batch.evaluate(theta, gradient, rows, last);
      for (int64_t d = 0; d < D; ++d) theta[d] += half * gradient[d] + spread * noise[d];
    }
    if (last) *value = sum * (rows ? plan.scale : 1.0);
  }
}

// SGLD has a gradient of its own for every thread, and no momentum.
template <class T>
int64_t minibatch_steps(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, const Steps& plan,
                        T* theta, T* momentum, T* gradient, double* value) try {
  Team team(chains < threads ? chains : threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  std::vector<std::vector<T>> slopes(team.size(), std::vector<T>(plan.friction ? 0 : net.dim));
  const double weight = data.weight * (plan.rows ? plan.scale : 1.0);
  for (int g = 0; g < team.size(); ++g) batches.emplace_back(new Batch<T>(net, data, prior, plan.rows, plan.batch, weight));
  team.each(chains, [&](int me, int64_t c) {
    diffuse<T>(*batches[me], plan, net.dim, c, chains, theta + c * net.dim, plan.friction ? momentum + c * net.dim : nullptr,
               plan.friction ? gradient + c * net.dim : slopes[me].data(), value + c);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- training ---------------------------------------------------------------------------------------------------------------------
struct Training {
  int64_t count, batch;
  const int64_t* rows;         // or null for all rows in each step
  int64_t step_pitch, member_pitch;  // from the rows of one step, and of one member, to the next
  const double* figures;       // [step][figure_pitch]: learning rate, the two corrections of Adam, number of the step
  int64_t figure_pitch, adam;  // or gradient descent with a momentum
  double first, second, tiny;  // the decays, and what is added to the root
  double clip;                 // largest norm of a gradient; 0 for any
  double weight, constant;     // of a row's likelihood in the loss; of the prior's part of it
  const void* const* uniform;  // of each layer [step][input][padded row], or null where nothing is dropped; null without dropout
  const void *rates, *precision;  // with dropout [member][layer], and the prior's precision [member][dim] in place of the other
  int64_t fixed;               // with dropout: parameters from here on stay as they are
};

// Minimises -weight * log likelihood + prior part of one member. `first_bad` gets the number of the first step whose loss is not finite.
template <class T>
void descend(Batch<T>& batch, const Prior& prior, const Training& plan, int64_t D, int64_t member, double active, T* theta, T* m, T* v,
             T* gradient, T* parts, double* first_bad) {
  const T *loc = static_cast<const T*>(prior.loc), *precision = static_cast<const T*>(prior.precision);
  const int64_t layers = batch.net.layers;
  std::vector<const T*> uniform(layers);
  Masks<T> masks = {uniform.data(), nullptr, batch.padded()};
  if (plan.uniform) precision = static_cast<const T*>(plan.precision) + member * D, masks.rate = static_cast<const T*>(plan.rates) + member * layers;
  for (int64_t k = 0; k < plan.count; ++k) {
    const double* figure = plan.figures + k * plan.figure_pitch;
    for (int64_t l = 0; l < layers && plan.uniform; ++l) {
      const T* all = static_cast<const T*>(plan.uniform[l]);
      uniform[l] = all ? all + k * batch.net.inputs[l] * batch.padded() : nullptr;
    }
    const int64_t* rows = plan.rows ? plan.rows + k * plan.step_pitch + member * plan.member_pitch : nullptr;
    double misfit = -plan.weight * batch.evaluate(theta, gradient, rows, true, plan.uniform ? &masks : nullptr), complexity = 0;
    if (plan.uniform) {
      for (int64_t d = 0; d < D; ++d) gradient[d] -= (theta[d] - loc[d]) * precision[d];
      for (int64_t d = plan.fixed; d < D; ++d) gradient[d] = 0;
    }
    double squares[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t d = 0; d < D; ++d) squares[d % 8] += double(precision[d]) * (double(theta[d]) - loc[d]) * (double(theta[d]) - loc[d]);
    for (double one : squares) complexity += 0.5 * one;
    complexity += plan.constant;
    T factor = T(-1);  // the gradient is of the log density
    if (plan.clip > 0) {
      double norm = 0;
      for (int64_t d = 0; d < D; ++d) norm += double(gradient[d]) * gradient[d];
      norm = std::sqrt(norm);
      if (norm > plan.clip) factor = T(-plan.clip / norm);
    }
    const T rate = T(figure[0] * active), one = T(figure[1]), two = T(figure[2]);
    const T b1 = T(plan.first), b2 = T(plan.second), r1 = T(1 - plan.first), r2 = T(1 - plan.second), tiny = T(plan.tiny);
    if (plan.adam)
      for (int64_t d = 0; d < D; ++d) {
        const T g = factor * gradient[d];
        m[d] = b1 * m[d] + r1 * g;
        v[d] = b2 * v[d] + r2 * (g * g);
        theta[d] -= rate * (m[d] * one) / (std::sqrt(v[d]) * two + tiny);
      }
    else
      for (int64_t d = 0; d < D; ++d) {
        m[d] = b1 * m[d] + factor * gradient[d];
        theta[d] -= rate * m[d];
      }
    parts[0] = T(misfit), parts[1] = T(complexity);
    if (!std::isfinite(misfit + complexity) && figure[3] < *first_bad) *first_bad = figure[3];
  }
}

template <class T>
int64_t training_steps(const Network& net, const Rows& data, const Prior& prior, int64_t members, int64_t threads, const Training& plan,
                       const T* active, T* theta, T* m, T* v, T* parts, double* first_bad) try {
  Team team(members < threads ? members : threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  std::vector<std::vector<T>> slopes(team.size(), std::vector<T>(net.dim));
  for (int g = 0; g < team.size(); ++g) batches.emplace_back(new Batch<T>(net, data, prior, plan.rows, plan.batch, plan.weight));
  team.each(members, [&](int me, int64_t c) {
    descend<T>(*batches[me], prior, plan, net.dim, c, active[c], theta + c * net.dim, m + c * net.dim, v ? v + c * net.dim : nullptr,
               slopes[me].data(), parts + 2 * c, first_bad + c);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace
