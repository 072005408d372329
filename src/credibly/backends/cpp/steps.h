// Minibatch steps of one chain (SGLD, SGHMC) or ensemble member (training with or without dropout).
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "chain.h"
#include "layout.h"
#include "masks.h"
#include "thread_pool.h"

namespace {

// A minibatch copied into columns of its own, and the density on it; all rows if there are no minibatches.
template <class T> class Batch {
 public:
  Batch(const Density<T>& density, bool has_rows, int64_t size, double weight)
      : net(density.network), all(density.data), size(size), batch(density.data) {
    batch.weight = weight;
    targets = all.kind == CATEGORICAL ? 1 : all.targets;
    if (has_rows) {
      const int64_t padded = (size + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
      columns.assign((net.inputs[0] + targets + 1) * padded + 64 / sizeof(T), T(0));
      T* aligned = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(columns.data()) + 63) / 64 * 64);
      batch.rows = size, batch.padded = padded;
      batch.x = x = aligned, batch.y = y = aligned + net.inputs[0] * padded;
      if (all.row_weight) batch.row_weight = weights = y + targets * padded;
    }
    chain.reset(new Chain<T>(net, batch, density.prior, {}, nullptr));
  }

  // Writes the gradient of the log density. Returns the log likelihood of these rows if `value` is set.
  double evaluate(const T* theta, T* gradient, const int64_t* rows, bool value, const Masks<T>* masks = nullptr) {
    if (rows) {
      gather(all.x, net.inputs[0], x, rows);
      gather(all.y, targets, y, rows);
      if (weights) gather(all.row_weight, 1, weights, rows);
    }
    return chain->evaluate(theta, gradient, value, masks);
  }
  int64_t padded() const { return batch.padded; }

  const Network& net;

 private:
  void gather(const T* from, int64_t count, T* to, const int64_t* rows) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < size; ++r) to[i * batch.padded + r] = from[i * all.padded + rows[r]];
  }
  const Data<T>& all;
  int64_t size, targets;
  Data<T> batch;
  std::vector<T> columns;
  T *x = nullptr, *y = nullptr, *weights = nullptr;
  std::unique_ptr<Chain<T>> chain;
};

// -- SGLD and SGHMC ------------------------------------------------------------------------------------------------
template <class T>
void sample_chain(Batch<T>& batch, const MinibatchSteps<T>& args, int64_t D, int64_t chain) {
  T *theta = args.theta + chain * D, *momentum = args.momentum + chain * D, *gradient = args.gradient + chain * D;
  const T* root = args.root;
  for (int64_t k = 0; k < args.count; ++k) {
    const double *schedule = args.schedule + 4 * k, size = schedule[0], decay = schedule[2];
    const int64_t* rows = args.rows ? args.rows + (k * args.chains + chain) * args.batch : nullptr;
    const T* noise = args.noise + chain * args.noise_pitch + k * D;
    const T half = T(0.5 * size);
    const bool last = k + 1 == args.count;
    const T keep = T(decay), noise_scale = T(std::sqrt(1 - decay * decay) * schedule[1]);
    if (root)
      for (int64_t d = 0; d < D; ++d) {
        T m = momentum[d] + half * root[d] * gradient[d];
        theta[d] += half * root[d] * m;
        m = keep * m + noise_scale * noise[d];
        theta[d] += half * root[d] * m;
        momentum[d] = m;
      }
    else
      for (int64_t d = 0; d < D; ++d) {
        T m = momentum[d] + half * gradient[d];
        theta[d] += half * m;
        m = keep * m + noise_scale * noise[d];
        theta[d] += half * m;
        momentum[d] = m;
      }
    const double sum = batch.evaluate(theta, gradient, rows, last);
    for (int64_t d = 0; d < D; ++d) momentum[d] += half * (root ? root[d] * gradient[d] : gradient[d]);
    if (last) args.log_likelihood[chain] = sum * (rows ? args.scale : 1.0);
  }
}

template <class T> int64_t minibatch_steps(const Density<T>& density, const MinibatchSteps<T>& args) try {
  const int64_t D = density.network.dim;
  ThreadPool pool(args.chains < args.threads ? args.chains : args.threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  const double weight = density.data.weight * (args.rows ? args.scale : 1.0);
  for (int g = 0; g < pool.size(); ++g) batches.emplace_back(new Batch<T>(density, args.rows, args.batch, weight));
  pool.run(args.chains, [&](int thread, int64_t c) { sample_chain<T>(*batches[thread], args, D, c); });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- training ------------------------------------------------------------------------------------------------------
template <class T>
void train_member(Batch<T>& batch, const Prior<T>& prior, const TrainingSteps<T>& args, int64_t D, int64_t member,
                  T* gradient) {
  const double active = args.active[member];
  T *theta = args.theta + member * D, *m = args.first_moment + member * D;
  T *v = args.second_moment ? args.second_moment + member * D : nullptr, *parts = args.loss_parts + 2 * member;
  double* first_bad = args.first_bad + member;
  const T *loc = prior.loc, *precision = prior.precision;
  const int64_t layers = batch.net.layers;
  std::vector<const T*> uniform(layers);
  Masks<T> masks = {uniform.data(), nullptr, batch.padded()};
  if (args.uniform) precision = args.precision + member * D, masks.rate = args.rates + member * layers;
  for (int64_t k = 0; k < args.count; ++k) {
    const double* schedule = args.schedule + k * args.schedule_pitch;
    for (int64_t l = 0; l < layers && args.uniform; ++l)
      uniform[l] = args.uniform[l] ? args.uniform[l] + k * batch.net.inputs[l] * batch.padded() : nullptr;
    const int64_t* rows = args.rows ? args.rows + k * args.step_pitch + member * args.member_pitch : nullptr;
    const double log_likelihood = batch.evaluate(theta, gradient, rows, true, args.uniform ? &masks : nullptr);
    const double likelihood_part = -args.weight * log_likelihood;
    double prior_part = 0;
    if (args.uniform) {
      for (int64_t d = 0; d < D; ++d) gradient[d] -= (theta[d] - loc[d]) * precision[d];
      for (int64_t d = args.fixed_from; d < D; ++d) gradient[d] = 0;
    }
    double squares[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t d = 0; d < D; ++d)
      squares[d % 8] += double(precision[d]) * (double(theta[d]) - loc[d]) * (double(theta[d]) - loc[d]);
    for (double square : squares) prior_part += 0.5 * square;
    prior_part += args.constant;
    T factor = T(-1);  // the gradient is that of the log density
    if (args.clip_norm > 0) {
      double norm = 0;
      for (int64_t d = 0; d < D; ++d) norm += double(gradient[d]) * gradient[d];
      norm = std::sqrt(norm);
      if (norm > args.clip_norm) factor = T(-args.clip_norm / norm);
    }
    const T rate = T(schedule[0] * active), correction1 = T(schedule[1]), correction2 = T(schedule[2]);
    const T b1 = T(args.beta1), b2 = T(args.beta2), eps = T(args.eps);
    const T r1 = T(1 - args.beta1), r2 = T(1 - args.beta2);
    if (args.adam)
      for (int64_t d = 0; d < D; ++d) {
        const T g = factor * gradient[d];
        m[d] = b1 * m[d] + r1 * g;
        v[d] = b2 * v[d] + r2 * (g * g);
        theta[d] -= rate * (m[d] * correction1) / (std::sqrt(v[d]) * correction2 + eps);
      }
    else
      for (int64_t d = 0; d < D; ++d) {
        m[d] = b1 * m[d] + factor * gradient[d];
        theta[d] -= rate * m[d];
      }
    parts[0] = T(likelihood_part), parts[1] = T(prior_part);
    if (!std::isfinite(likelihood_part + prior_part) && schedule[3] < *first_bad) *first_bad = schedule[3];
  }
}

template <class T> int64_t training_steps(const Density<T>& density, const TrainingSteps<T>& args) try {
  const int64_t D = density.network.dim;
  ThreadPool pool(args.members < args.threads ? args.members : args.threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  std::vector<std::vector<T>> gradients(pool.size(), std::vector<T>(D));
  for (int g = 0; g < pool.size(); ++g)
    batches.emplace_back(new Batch<T>(density, args.rows, args.batch, args.weight));
  pool.run(args.members, [&](int thread, int64_t member) {
    train_member<T>(*batches[thread], density.prior, args, D, member, gradients[thread].data());
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace
