// Densities of small multilayer perceptrons and trajectories on them, each chain by itself in one thread's fast memory.
//
// Rows lie along the vectors of the processor: values of a layer are [unit][row], so that a weight is one number for a whole
// vector, and no unit count has to fit anything. Rows go in tiles whose activations stay in the second cache. A tile adds its
// own sums to the gradient, in the order of the tiles: threads change no bit, and neither do other chains.

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "chain.h"
#include "network.h"
#include "steps.h"
#include "team.h"
#include "tile.h"
#include "vectors.h"

namespace {

template <class T>
int64_t trajectories(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, T* theta, T* momentum,
                     T* gradient, double* log_likelihood, const T* size, const T* inverse_mass, const int64_t* steps, int64_t drifts,
                     const double* kick, const double* drift) {
  return for_chains<T>(net, data, prior, chains, threads, [&](Chain<T>& density, int64_t c) {
    density.trajectory(theta + c * net.dim, momentum + c * net.dim, gradient + c * net.dim, log_likelihood + c, size[c], inverse_mass,
                       steps[c], drifts, kick, drift);
  });
}

template <class T>
int64_t evaluations(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, const T* theta,
                    T* gradient, double* log_likelihood) {
  return for_chains<T>(net, data, prior, chains, threads, [&](Chain<T>& density, int64_t c) {
    log_likelihood[c] = density.evaluate(theta + c * net.dim, gradient + c * net.dim, true);
  });
}

// out[chain][row][output] for rows that lie as in Rows; `pitch` is from one parameter vector to the next.
template <class T>
int64_t outputs(const Network& net, const T* x, int64_t count, int64_t padded, int64_t chains, int64_t threads, const T* theta,
                int64_t pitch, T* out) try {
  const int64_t length = tile_rows(padded), tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  Team team(threads);
  std::vector<std::unique_ptr<Workspace<T>>> spaces;
  for (int g = 0; g < team.size(); ++g) spaces.emplace_back(new Workspace<T>(net));
  team.each(chains * tiles, [&](int me, int64_t job) {
    const int64_t c = job / tiles, first = job % tiles * length, rows = padded - first < length ? padded - first : length;
    spaces[me]->forward(x + first, padded, theta + c * pitch, rows, false);
    spaces[me]->store(count - first < rows ? count - first : rows, out + (c * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- passes with dropout ------------------------------------------------------------------------------------------------------------
// All passes of a tile see the same rows: the first layer's sums without a mask are there once, and a pass takes away what it drops.
template <class T> class Passes {
 public:
  Passes(const Network& net) : net(net), plain(net), space(net), theta(net.dim), changes(net.inputs[0]), places(net.inputs[0]) {}

  void begin(const T* x, int64_t pitch, const T* given, int64_t rows) {
    this->x = x, this->pitch = pitch, this->given = given, this->rows = rows;
    affine<T>(given + net.weight[0], net.inputs[0], 1, nullptr, x, pitch, net.inputs[0], net.outputs[0], rows, plain.values[0], nullptr,
              NONE, nullptr);
  }

  // Outputs of one pass, in the workspace; masks[layer] + at is the mask of its inputs, or masks[layer] null.
  Workspace<T>& pass(const T* const* masks, int64_t at) {
    std::memcpy(theta.data(), given, net.dim * sizeof(T));
    const int64_t inputs = net.inputs[0];
    T most = masks[0] ? T(0) : T(1);
    for (int64_t i = 0; i < inputs && masks[0]; ++i) most = masks[0][at + i] > most ? masks[0][at + i] : most;
    int64_t count = 0;
    for (int64_t i = 0; i < inputs && masks[0]; ++i)
      if (masks[0][at + i] != most) places[count] = i, changes[count++] = masks[0][at + i] - most;
    const bool few = 2 * count < inputs;
    if (few) first_layer(most, count);
    for (int64_t l = few ? 1 : 0; l < net.layers; ++l) {  // a mask of a layer's inputs is one of the columns of its weight
      T* w = theta.data() + net.weight[l];
      for (int64_t j = 0; j < net.outputs[l] && masks[l]; ++j, w += net.inputs[l])
        for (int64_t i = 0; i < net.inputs[l]; ++i) w[i] *= masks[l][at + i];
    }
    space.forward(x, pitch, theta.data(), rows, false, few ? 1 : 0);
    return space;
  }

 private:
  // All that a loop needs is in its own variables: numbers that are written could be any of the members.
  void first_layer(T most, int64_t count) {
    constexpr int L = Lanes<T>::N;
    const int64_t inputs = net.inputs[0], rows = this->rows, pitch = this->pitch, act = net.activation[0], *places = this->places.data();
    const T *x = this->x, *w = given + net.weight[0], *bias = net.bias[0] < 0 ? nullptr : given + net.bias[0];
    T* change = theta.data() + net.weight[0];  // ours to write on: the forward pass begins after it
    for (int64_t j = 0; j < net.outputs[0]; ++j) {
      const T *from = plain.values[0] + j * PITCH, start = bias ? bias[j] : T(0);
      T* to = space.values[0] + j * PITCH;
      for (int64_t k = 0; k < count; ++k) change[k] = w[j * inputs + places[k]] * changes[k];
      for (int64_t r = 0; r < rows; r += 2 * L) {
        Vec<T> one = start + most * *(const Vec<T>*)(from + r), two = start + most * *(const Vec<T>*)(from + r + L);
        for (int64_t k = 0; k < count; ++k) {
          const T* column = x + places[k] * pitch + r;
          one += change[k] * *(const Vec<T>*)column;
          two += change[k] * *(const Vec<T>*)(column + L);
        }
        *(Vec<T>*)(to + r) = activated<T>(act, one);
        *(Vec<T>*)(to + r + L) = activated<T>(act, two);
      }
    }
  }
  const Network& net;
  Workspace<T> plain, space;
  std::vector<T> theta, changes;
  std::vector<int64_t> places;
  const T *x = nullptr, *given = nullptr;
  int64_t pitch = 0, rows = 0;
};

// out[pass][row][output]; masks are `pitch` apart from one pass to the next.
template <class T>
int64_t passes(const Network& net, const T* x, int64_t count, int64_t padded, int64_t passes, int64_t threads, const T* theta,
               const T* const* masks, int64_t pitch, T* out) try {
  const int64_t length = tile_rows(padded), tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  Team team(threads);
  const int64_t parts = tiles < team.size() ? team.size() : 1;  // of the passes, where there are fewer tiles than threads
  std::vector<std::unique_ptr<Passes<T>>> own;
  for (int g = 0; g < team.size(); ++g) own.emplace_back(new Passes<T>(net));
  team.each(tiles * parts, [&](int me, int64_t job) {
    const int64_t part = job % parts, first = job / parts * length, rows = padded - first < length ? padded - first : length;
    own[me]->begin(x + first, padded, theta, rows);
    for (int64_t p = part * passes / parts; p < (part + 1) * passes / parts; ++p)
      own[me]->pass(masks, p * pitch).store(count - first < rows ? count - first : rows, out + (p * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                                    \
  extern "C" int64_t trajectories_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,          \
                                           int64_t threads, T* theta, T* momentum, T* gradient, double* log_likelihood,       \
                                           const T* size, const T* inverse_mass, const int64_t* steps, int64_t drifts,        \
                                           const double* kick, const double* drift) {                                         \
    return trajectories<T>(*net, *data, *prior, chains, threads, theta, momentum, gradient, log_likelihood, size,             \
                           inverse_mass, steps, drifts, kick, drift);                                                         \
  }                                                                                                                          \
  extern "C" int64_t evaluations_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,           \
                                          int64_t threads, const T* theta, T* gradient, double* log_likelihood) {             \
    return evaluations<T>(*net, *data, *prior, chains, threads, theta, gradient, log_likelihood);                             \
  }                                                                                                                          \
  extern "C" int64_t minibatch_steps_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,       \
                                              int64_t threads, const Steps* plan, T* theta, T* momentum, T* gradient,         \
                                              double* value) {                                                                \
    return minibatch_steps<T>(*net, *data, *prior, chains, threads, *plan, theta, momentum, gradient, value);                 \
  }                                                                                                                          \
  extern "C" int64_t training_steps_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t members,       \
                                             int64_t threads, const Training* plan, const T* active, T* theta, T* m, T* v,    \
                                             T* parts, double* first_bad) {                                                   \
    return training_steps<T>(*net, *data, *prior, members, threads, *plan, active, theta, m, v, parts, first_bad);            \
  }                                                                                                                          \
  extern "C" int64_t outputs_##SUFFIX(const Network* net, const T* x, int64_t count, int64_t padded, int64_t chains,          \
                                      int64_t threads, const T* theta, int64_t pitch, T* out) {                               \
    return outputs<T>(*net, x, count, padded, chains, threads, theta, pitch, out);                                            \
  }                                                                                                                          \
  extern "C" int64_t passes_##SUFFIX(const Network* net, const T* x, int64_t count, int64_t padded, int64_t count_passes,     \
                                     int64_t threads, const T* theta, const T* const* masks, int64_t pitch, T* out) {         \
    return passes<T>(*net, x, count, padded, count_passes, threads, theta, masks, pitch, out);                                \
  }
EXPORT(float, f32)
EXPORT(double, f64)
