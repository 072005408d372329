// Densities of small multilayer perceptrons, trajectories on them, and predictions.
//
// Rows lie along SIMD vectors: values of a layer are [unit][row], so a weight is one number for a whole vector and no
// number of units has to be a multiple of anything. Rows are processed in tiles whose activations stay in the L2 cache.
// Gradients are summed in the order of the tiles, so results depend neither on the number of threads nor on other
// chains. mlp_f32.cpp and mlp_f64.cpp export the functions for their dtypes.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "chain.h"
#include "steps.h"
#include "thread_pool.h"
#include "paths.h"
#include "tree.h"
#include "vectors.h"
#include "workspace.h"

namespace {

template <class T> int64_t trajectories(const Density<T>& density, const Trajectories<T>& args) {
  return for_chains<T>(density, args.chains, args.threads,
                       [&](Chain<T>& chain, int64_t c) { chain.trajectory(args, c); });
}

template <class T> int64_t evaluations(const Density<T>& density, const Evaluations<T>& args) {
  const int64_t D = density.network.dim;
  return for_chains<T>(density, args.chains, args.threads, [&](Chain<T>& chain, int64_t c) {
    args.log_likelihood[c] = chain.evaluate(args.theta + c * D, args.gradient + c * D, true);
  });
}

template <class T> int64_t decodings(const Density<T>& density, const Decodings<T>& args) {
  const int64_t D = density.network.dim;
  return for_chains<T>(density, args.chains, args.threads, [&](Chain<T>& chain, int64_t c) {
    chain.decode(args.standardised + c * D, args.theta + c * D);
  });
}

template <class T> int64_t outputs(const Outputs<T>& args) try {
  const Network& net = args.network;
  const int64_t count = args.rows, padded = args.padded, length = tile_rows(padded);
  const int64_t tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  ThreadPool pool(args.threads);
  std::vector<std::unique_ptr<Workspace<T>>> workspaces;
  for (int g = 0; g < pool.size(); ++g) workspaces.emplace_back(new Workspace<T>(net));
  pool.run(args.chains * tiles, [&](int thread, int64_t job) {
    const int64_t c = job / tiles, first = job % tiles * length;
    const int64_t rows = padded - first < length ? padded - first : length;
    workspaces[thread]->forward(args.x + first, padded, args.theta + c * net.dim, rows, false);
    workspaces[thread]->store(count - first < rows ? count - first : rows, args.out + (c * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- passes with dropout -------------------------------------------------------------------------------------------
// All passes see the same rows. The first layer is computed once per tile without a mask; a pass subtracts the inputs
// that it drops.
template <class T> class DropoutPasses {
 public:
  DropoutPasses(const Network& net)
      : net(net), unmasked(net), workspace(net), masked_theta(net.dim), changes(net.inputs[0]), changed(net.inputs[0]) {
  }

  void start_tile(const T* x, int64_t pitch, const T* theta, int64_t rows) {
    this->x = x, this->pitch = pitch, this->theta = theta, this->rows = rows;
    affine<T>(theta + net.weight[0], net.inputs[0], 1, nullptr, x, pitch, net.inputs[0], net.outputs[0], rows,
              unmasked.values[0], nullptr, NONE, nullptr);
  }

  // Runs one pass; masks[layer] + offset is the mask of the inputs of a layer, null for none.
  Workspace<T>& pass(const T* const* masks, int64_t offset) {
    std::memcpy(masked_theta.data(), theta, net.dim * sizeof(T));
    const int64_t inputs = net.inputs[0];
    T gain = masks[0] ? T(0) : T(1);  // of the inputs that are kept
    for (int64_t i = 0; i < inputs && masks[0]; ++i) gain = masks[0][offset + i] > gain ? masks[0][offset + i] : gain;
    int64_t count = 0;
    for (int64_t i = 0; i < inputs && masks[0]; ++i)
      if (masks[0][offset + i] != gain) changed[count] = i, changes[count++] = masks[0][offset + i] - gain;
    const bool few = 2 * count < inputs;
    if (few) first_layer(gain, count);
    // A mask of the inputs of a layer is a mask of the columns of its weight.
    for (int64_t l = few ? 1 : 0; l < net.layers; ++l) {
      T* w = masked_theta.data() + net.weight[l];
      for (int64_t j = 0; j < net.outputs[l] && masks[l]; ++j, w += net.inputs[l])
        for (int64_t i = 0; i < net.inputs[l]; ++i) w[i] *= masks[l][offset + i];
    }
    workspace.forward(x, pitch, masked_theta.data(), rows, false, few ? 1 : 0);
    return workspace;
  }

 private:
  // Loops use local variables: as far as the compiler knows, a store could change any member.
  void first_layer(T gain, int64_t count) {
    constexpr int L = Lanes<T>::N;
    const int64_t inputs = net.inputs[0], rows = this->rows, pitch = this->pitch, act = net.activation[0];
    const int64_t* changed = this->changed.data();
    const T *x = this->x, *w = theta + net.weight[0], *bias = net.bias[0] < 0 ? nullptr : theta + net.bias[0];
    T* change = masked_theta.data() + net.weight[0];  // free for use: the forward pass starts at the next layer
    for (int64_t j = 0; j < net.outputs[0]; ++j) {
      const T *from = unmasked.values[0] + j * PITCH, start = bias ? bias[j] : T(0);
      T* to = workspace.values[0] + j * PITCH;
      for (int64_t k = 0; k < count; ++k) change[k] = w[j * inputs + changed[k]] * changes[k];
      for (int64_t r = 0; r < rows; r += 2 * L) {
        Vec<T> one = start + gain * *(const Vec<T>*)(from + r), two = start + gain * *(const Vec<T>*)(from + r + L);
        for (int64_t k = 0; k < count; ++k) {
          const T* column = x + changed[k] * pitch + r;
          one += change[k] * *(const Vec<T>*)column;
          two += change[k] * *(const Vec<T>*)(column + L);
        }
        *(Vec<T>*)(to + r) = activated<T>(act, one);
        *(Vec<T>*)(to + r + L) = activated<T>(act, two);
      }
    }
  }
  const Network& net;
  Workspace<T> unmasked, workspace;
  std::vector<T> masked_theta, changes;
  std::vector<int64_t> changed;
  const T *x = nullptr, *theta = nullptr;
  int64_t pitch = 0, rows = 0;
};

template <class T> int64_t passes(const Passes<T>& args) try {
  const Network& net = args.network;
  const int64_t count = args.rows, padded = args.padded, length = tile_rows(padded);
  const int64_t tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  ThreadPool pool(args.threads);
  const int64_t blocks = tiles < pool.size() ? pool.size() : 1;  // of passes, if there are fewer tiles than threads
  std::vector<std::unique_ptr<DropoutPasses<T>>> workers;
  for (int g = 0; g < pool.size(); ++g) workers.emplace_back(new DropoutPasses<T>(net));
  pool.run(tiles * blocks, [&](int thread, int64_t job) {
    const int64_t block = job % blocks, first = job / blocks * length;
    const int64_t rows = padded - first < length ? padded - first : length;
    workers[thread]->start_tile(args.x + first, padded, args.theta, rows);
    for (int64_t p = block * args.passes / blocks; p < (block + 1) * args.passes / blocks; ++p)
      workers[thread]
          ->pass(args.masks, p * args.mask_pitch)
          .store(count - first < rows ? count - first : rows, args.out + (p * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace

#define EXPORT_MLP(T, SUFFIX)                                                                            \
  EXPORTED int64_t evaluations_##SUFFIX(const Density<T>* density, const Evaluations<T>* args) {         \
    return evaluations(*density, *args);                                                                 \
  }                                                                                                      \
  EXPORTED int64_t decodings_##SUFFIX(const Density<T>* density, const Decodings<T>* args) {             \
    return decodings(*density, *args);                                                                   \
  }                                                                                                      \
  EXPORTED int64_t trajectories_##SUFFIX(const Density<T>* density, const Trajectories<T>* args) {       \
    return trajectories(*density, *args);                                                                \
  }                                                                                                      \
  EXPORTED int64_t trees_##SUFFIX(const Density<T>* density, const Trees<T>* args) {                     \
    return trees(*density, *args);                                                                       \
  }                                                                                                      \
  EXPORTED int64_t paths_##SUFFIX(const Density<T>* density, const Paths<T>* args) {                     \
    return paths(*density, *args);                                                                       \
  }                                                                                                      \
  EXPORTED int64_t minibatch_steps_##SUFFIX(const Density<T>* density, const MinibatchSteps<T>* args) {  \
    return minibatch_steps(*density, *args);                                                             \
  }                                                                                                      \
  EXPORTED int64_t training_steps_##SUFFIX(const Density<T>* density, const TrainingSteps<T>* args) {    \
    return training_steps(*density, *args);                                                              \
  }                                                                                                      \
  EXPORTED int64_t outputs_##SUFFIX(const Outputs<T>* args) { return outputs(*args); }                   \
  EXPORTED int64_t passes_##SUFFIX(const Passes<T>* args) { return passes(*args); }
