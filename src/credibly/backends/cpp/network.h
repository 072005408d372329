// Networks, data and priors as the caller describes them.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t GRAIN = 32;  // rows are padded to a multiple of this
constexpr int64_t TILE = 512;   // rows of a tile, at most
constexpr int64_t PITCH = TILE + 16;  // from one unit to the next: no power of two, or they would fall on the same lines of a cache

// What the caller describes; the same in stack.py and density.py.
struct Network {
  int64_t layers;
  const int64_t* inputs;       // of each layer
  const int64_t* outputs;
  const int64_t* weight;       // place of its weight (outputs, inputs) in a parameter vector
  const int64_t* bias;         // and of its bias, or -1
  const int64_t* activation;   // after it
  int64_t dim;                 // of a parameter vector
};
struct Rows {
  int64_t count, padded;
  const void* x;               // [input][padded row]
  const void* y;               // [target][padded row]; class numbers as reals
  int64_t kind;                // of the likelihood
  int64_t targets;
  const double* scale;         // [target], where fixed
  int64_t log_scale;           // place of the learned log scale, or -1
  int64_t per_target;
  double weight;               // 1 / temperature of the likelihood
};
struct Prior {
  const void* loc;             // (dim,)
  const void* precision;       // (dim,), times 1 / temperature of the prior
};
enum Activation { NONE, RELU, TANH, SILU, SIGMOID };
enum Likelihood { GAUSSIAN, HETEROSCEDASTIC, CATEGORICAL, BERNOULLI };

}  // namespace
