// The density of one chain on all rows, trajectories on it, and the distribution of chains over threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "collapsed.h"
#include "masks.h"
#include "thread_pool.h"
#include "trajectory.h"
#include "workspace.h"

namespace {

// -- the density of one chain --------------------------------------------------------------------------------------
// One thread processes the tiles in turn, or several share them. Either way tiles are summed in order.
template <class T> class Chain {
 public:
  Chain(const Network& net, const Data<T>& data, const Prior<T>& prior, const OutputPrior& output, ThreadPool* pool)
      : net(net), data(data), prior(prior), pool(pool), length(tile_rows(data.padded)) {
    tiles = (data.padded + length - 1) / length;
    if (tiles == 1 || (pool && pool->size() == 1)) this->pool = nullptr;
    if (output.precision) {
      collapsed.reset(new CollapsedOutput<T>(net, data, output, this->pool));
      return;
    }
    const int threads = this->pool ? this->pool->size() : 1;
    for (int t = 0; t < threads; ++t) workspaces.emplace_back(new Workspace<T>(net));
    if (this->pool) partial.resize(tiles * net.dim);
    sums.resize(tiles);
  }
  Chain(const Chain&) = delete;

  // Writes the gradient of the log density. Returns the log likelihood if `value` is set.
  double evaluate(const T* theta, T* gradient, bool value, const Masks<T>* masks = nullptr) {
    for (auto& workspace : workspaces) workspace->masks = masks;
    std::memset(gradient, 0, net.dim * sizeof(T));
    double sum = 0;
    if (collapsed) {
      sum = collapsed->evaluate(theta, gradient, value);
    } else if (!pool) {
      for (int64_t t = 0; t < tiles; ++t) sums[t] = evaluate_tile(0, t, theta, value, gradient);
    } else {
      pool->run(tiles, [&](int thread, int64_t t) {
        T* tile_gradient = partial.data() + t * net.dim;
        std::memset(tile_gradient, 0, net.dim * sizeof(T));
        sums[t] = evaluate_tile(thread, t, theta, value, tile_gradient);
      });
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t d = 0; d < net.dim; ++d) gradient[d] += partial[t * net.dim + d];
    }
    const T *loc = prior.loc, *precision = prior.precision;
    for (int64_t d = 0; d < net.dim; ++d) gradient[d] -= (theta[d] - loc[d]) * precision[d];
    for (double part : sums) sum += part;
    return sum;
  }

  // Copies a parameter vector, with output weights in place of standardised ones.
  void decode(const T* standardised, T* theta) { collapsed->decode(standardised, theta); }

  // Moves chain `c` along its trajectory.
  void trajectory(const Trajectories<T>& args, int64_t c) {
    integrate<T>(args, c, net.dim,
                 [this](const T* theta, T* gradient, bool value) { return evaluate(theta, gradient, value); });
  }

 private:
  double evaluate_tile(int thread, int64_t t, const T* theta, bool value, T* gradient) {
    const int64_t first = t * length, rows = data.padded - first < length ? data.padded - first : length;
    return workspaces[thread]->evaluate(data, theta, first, rows, value, gradient);
  }
  const Network& net;
  const Data<T>& data;
  const Prior<T>& prior;
  ThreadPool* pool;
  int64_t length, tiles;
  std::unique_ptr<CollapsedOutput<T>> collapsed;  // null unless output weights are integrated out
  std::vector<std::unique_ptr<Workspace<T>>> workspaces;
  std::vector<T> partial;
  std::vector<double> sums;
};

// Calls task(density, chain) for every chain: chains in parallel, or one after another with all threads on each.
template <class T, class Task>
int64_t for_chains(const Density<T>& density, int64_t chains, int64_t threads, Task task) try {
  ThreadPool pool(threads);
  const bool parallel_chains = chains >= pool.size();
  std::vector<std::unique_ptr<Chain<T>>> densities;
  for (int g = 0; g < (parallel_chains ? pool.size() : 1); ++g)
    densities.emplace_back(new Chain<T>(density.network, density.data, density.prior, density.output,
                                        parallel_chains ? nullptr : &pool));
  if (parallel_chains)
    pool.run(chains, [&](int thread, int64_t c) { task(*densities[thread], c); });
  else
    for (int64_t c = 0; c < chains; ++c) task(*densities[0], c);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace
