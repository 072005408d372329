// Trajectories of small multilayer perceptrons on a GPU. A chain stays in one multiprocessor, or in a few that
// synchronise twice per gradient.
//
// A warp takes 32 rows at a time. In the forward and backward pass a lane is a row: values are [unit][row] in shared
// memory and a weight is one number for all lanes. For the gradient of the weights a lane is a unit: sums over rows
// stay in its registers until the warp has processed all of its rows. Sums of warps and blocks are added in a fixed
// order, so results are bit-for-bit reproducible.
//
// spec.py prepends these constants:
//   REAL: dtype; LAYERS, TARGETS, DRIFTS: counts; KIND: a likelihood; IN, OUT, ACT: [layer] sizes and activation.
//   WEIGHT, BIAS: [layer] offsets in a parameter vector whose weight rows are padded to 16 bytes. Its elements are
//     called slots. SLOTS: its length; LOG_SCALE: slot of the learned log scale, or -1; PER_TARGET: whether per target.
//   BLOCKS: per chain; WARPS: of a block that process rows; BLOCK_WARPS: with helpers that only add up.
//   INPUTS, VALUES, DERIVATIVES: [layer] offsets in the memory of a warp; WARP_MEMORY: its size; INPUT_SIZE: of inputs.

enum { NONE, RELU, TANH, SILU, SIGMOID };
enum { GAUSSIAN, HETEROSCEDASTIC, CATEGORICAL, BERNOULLI };

constexpr int PACK = 16 / int(sizeof(REAL));  // numbers per load
constexpr int PITCH = 32 + PACK;  // from one unit to the next: avoids bank conflicts along units and along rows
constexpr int MAX_SUMS = 28;      // sums that a lane keeps in registers in a forward or backward pass
constexpr double HALF_LOG_TWO_PI = 0.91893853320467274178;

struct alignas(16) Pack { REAL at[PACK]; };
__device__ inline Pack load(const REAL* from) { return *reinterpret_cast<const Pack*>(from); }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The parameter of the kernel. cuda/api.py mirrors it field by field, and a test compares the two.
struct Arguments {
  const REAL* x;              // [input][padded row]
  const REAL* y;              // [target][padded row], class labels as reals
  const REAL* loc;            // [slot], of the prior
  const REAL* precision;      // [slot], of the prior
  const double* scale;        // [target], the noise scale where it is fixed
  const int* offset;          // [slot], offset in a parameter vector, or -1 for padding
  long long rows;
  long long padded;
  long long dim;              // length of a parameter vector
  double weight;              // 1 / temperature of the likelihood
  REAL* theta;                // [chain][dim]
  REAL* momentum;             // [chain][dim]
  REAL* gradient;             // [chain][dim]
  double* log_likelihood;     // [chain]
  const REAL* step_size;      // [chain]
  const REAL* inverse_mass;   // [dim], or null for ones
  const int* steps;           // [chain], negative for an evaluation without steps
  REAL* partial;              // [chain][BLOCKS + 1][slot], gradients of blocks and their total
  double* partial_value;      // [chain][BLOCKS]
  unsigned* arrivals;         // [chain], zero at launch
  double kick[DRIFTS + 1];
  double drift[DRIFTS];
};

#ifndef EMULATED
__device__ inline float exp_real(float v) { return expf(v); }
__device__ inline double exp_real(double v) { return exp(v); }
__device__ inline float divide(float a, float b) { return __fdividef(a, b); }
__device__ inline double divide(double a, double b) { return a / b; }
#endif
__device__ inline REAL logistic(REAL v) {
  return divide(REAL(1), REAL(1) + exp_real(-(v > REAL(-80) ? v : REAL(-80))));
}

template <int KIND_OF> __device__ inline void activate(REAL a, REAL& value, REAL& derivative) {
  if (KIND_OF == RELU) {
    value = a > REAL(0) ? a : REAL(0), derivative = a > REAL(0) ? REAL(1) : REAL(0);
  } else if (KIND_OF == TANH) {
    value = tanh(a), derivative = REAL(1) - value * value;
  } else if (KIND_OF == SILU) {
    const REAL s = logistic(a);
    value = a * s, derivative = s * (REAL(1) + a * (REAL(1) - s));
  } else if (KIND_OF == SIGMOID) {
    value = logistic(a), derivative = value * (REAL(1) - value);
  } else {
    value = a, derivative = REAL(1);
  }
}

// -- the gradient of the weights of a layer, summed over the rows of a warp ----------------------------------------
// Lanes are the outputs of the layer, or its inputs if these are more.
template <int L> struct Sums {
  static constexpr bool AFTER = OUT[L] >= IN[L];
  static constexpr int EACH = ceil_div(AFTER ? OUT[L] : IN[L], 32), OTHER = AFTER ? IN[L] : OUT[L];
  static constexpr int BIASES = AFTER ? EACH : OUT[L];
  REAL weight[EACH][OTHER], bias[BIASES];

  __device__ void clear() {
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
      for (int o = 0; o < OTHER; ++o) weight[e][o] = 0;
#pragma unroll
    for (int b = 0; b < BIASES; ++b) bias[b] = 0;
  }

  __device__ void add(const REAL* inputs, const REAL* delta, int lane) {
    const REAL* by_lane = AFTER ? delta : inputs;
    const REAL* by_index = AFTER ? inputs : delta;
    constexpr int UNITS = AFTER ? OUT[L] : IN[L];
#pragma unroll 1
    for (int r = 0; r < 32; r += PACK) {
      Pack lane_values[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int unit = lane + 32 * e;
        lane_values[e] = load(by_lane + (unit < UNITS ? unit : UNITS - 1) * PITCH + r);
        if (AFTER && BIAS[L] >= 0)
#pragma unroll
          for (int k = 0; k < PACK; ++k) bias[e] += lane_values[e].at[k];
      }
#pragma unroll
      for (int o = 0; o < OTHER; ++o) {
        const Pack other = load(by_index + o * PITCH + r);
#pragma unroll
        for (int k = 0; k < PACK; ++k)
#pragma unroll
          for (int e = 0; e < EACH; ++e) weight[e][o] += lane_values[e].at[k] * other.at[k];
      }
    }
    if (!AFTER && BIAS[L] >= 0)
#pragma unroll
      for (int b = 0; b < BIASES; ++b) bias[b] += delta[b * PITCH + lane];
  }

  __device__ void store(REAL* out, int lane) {
    constexpr int WIDE = ceil_div(IN[L], PACK) * PACK, UNITS = AFTER ? OUT[L] : IN[L];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int unit = lane + 32 * e;
      if (unit >= UNITS) continue;
#pragma unroll
      for (int o = 0; o < OTHER; ++o) out[WEIGHT[L] + (AFTER ? unit * WIDE + o : o * WIDE + unit)] = weight[e][o];
      if (AFTER && BIAS[L] >= 0) out[BIAS[L] + unit] = bias[e];
    }
    if (!AFTER && BIAS[L] >= 0)
#pragma unroll
      for (int b = 0; b < BIASES; ++b) {
        REAL sum = bias[b];
        for (int far = 16; far; far /= 2) sum += __shfl_down_sync(~0u, sum, far);
        if (lane == 0) out[BIAS[L] + b] = sum;
      }
  }
};

// -- one layer for 32 rows -----------------------------------------------------------------------------------------
template <int L> __device__ inline void forward_layer(const REAL* theta, REAL* memory, int lane) {
  constexpr int WIDE = ceil_div(IN[L], PACK) * PACK, SUMS = ceil_div(OUT[L], ceil_div(OUT[L], MAX_SUMS));
  const REAL *inputs = memory + INPUTS[L], *weights = theta + WEIGHT[L];
#pragma unroll 1
  for (int first = 0; first < OUT[L]; first += SUMS) {
    // The last round may read past the weights of the layer, and discards those sums.
    REAL sum[SUMS];
    const REAL* row = weights + first * WIDE;
#pragma unroll
    for (int j = 0; j < SUMS; ++j) sum[j] = BIAS[L] >= 0 ? theta[BIAS[L] + first + j] : REAL(0);
    int i = 0;
#pragma unroll 2
    for (; i + PACK <= IN[L]; i += PACK) {
      REAL value[PACK];
#pragma unroll
      for (int k = 0; k < PACK; ++k) value[k] = inputs[(i + k) * PITCH + lane];
#pragma unroll
      for (int j = 0; j < SUMS; ++j) {
        const Pack w = load(row + j * WIDE + i);
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum[j] += w.at[k] * value[k];
      }
    }
#pragma unroll
    for (int k = IN[L] / PACK * PACK; k < IN[L]; ++k) {
      const REAL value = inputs[k * PITCH + lane];
#pragma unroll
      for (int j = 0; j < SUMS; ++j) sum[j] += row[j * WIDE + k] * value;
    }
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
      if (first + j >= OUT[L]) continue;
      REAL value, derivative;
      activate<ACT[L]>(sum[j], value, derivative);
      memory[VALUES[L] + (first + j) * PITCH + lane] = value;
      if (ACT[L] != NONE) memory[DERIVATIVES[L] + (first + j) * PITCH + lane] = derivative;
    }
  }
}

// From `delta`, the derivative with respect to the outputs of layer L before its activation, to that of layer L - 1, in
// DERIVATIVES[L - 1].
template <int L> __device__ inline void backward_layer(const REAL* theta, REAL* memory, const REAL* delta, int lane) {
  constexpr int WIDE = ceil_div(IN[L], PACK) * PACK;
  constexpr int SUMS = ceil_div(ceil_div(IN[L], PACK), ceil_div(IN[L], MAX_SUMS)) * PACK;
  const REAL* weights = theta + WEIGHT[L];
#pragma unroll 1
  for (int first = 0; first < IN[L]; first += SUMS) {
    REAL sum[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = 0;
#pragma unroll 2
    for (int j = 0; j < OUT[L]; ++j) {
      const REAL d = delta[j * PITCH + lane];
#pragma unroll
      for (int i = 0; i < SUMS; i += PACK) {
        const Pack w = load(weights + j * WIDE + first + i);
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum[i + k] += w.at[k] * d;
      }
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      if (first + i < IN[L]) {
        REAL* derivative = memory + DERIVATIVES[L - 1] + (first + i) * PITCH + lane;
        *derivative = ACT[L - 1] != NONE ? sum[i] * *derivative : sum[i];
      }
  }
}

// Forward and backward pass of the layers from L on, with the sums of their gradients.
template <int L> struct Layers {
  Sums<L> sums;
  Layers<L + 1> rest;
  __device__ void clear() { sums.clear(), rest.clear(); }
  __device__ void forward(const REAL* theta, REAL* memory, int lane) {
    forward_layer<L>(theta, memory, lane);
    rest.forward(theta, memory, lane);
  }
  __device__ void backward(const REAL* theta, REAL* memory, int lane) {
    rest.backward(theta, memory, lane);
    REAL* delta = memory + (L + 1 == LAYERS ? VALUES[L] : DERIVATIVES[L]);
    if constexpr (L > 0) backward_layer<L>(theta, memory, delta, lane);
    __syncwarp();
    sums.add(memory + INPUTS[L], delta, lane);
  }
  __device__ void store(REAL* out, int lane) { sums.store(out, lane), rest.store(out, lane); }
};
template <> struct Layers<LAYERS> {
  __device__ void clear() {}
  __device__ void forward(const REAL*, REAL*, int) {}
  __device__ void backward(const REAL*, REAL*, int) {}
  __device__ void store(REAL*, int) {}
};

// -- likelihoods ---------------------------------------------------------------------------------------------------
// Overwrites the outputs of a row with the derivatives of its log likelihood. Returns the log likelihood if
// `want_value` is set. Adds the derivative with respect to learned log scales to `scale_gradient`.
__device__ inline double likelihood(const Arguments& args, const REAL* theta, REAL* out, long long row, int lane,
                                    bool want_value, REAL* scale_gradient) {
  const bool valid = row < args.rows;
  const REAL w = REAL(args.weight);
  double value = 0;
  if (KIND == CATEGORICAL) {
    const int label = valid ? int(args.y[row]) : 0;
    REAL largest = out[lane], normaliser = 0, chosen = 0;
#pragma unroll 1
    for (int k = 1; k < TARGETS; ++k) largest = out[k * PITCH + lane] > largest ? out[k * PITCH + lane] : largest;
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      const REAL shifted = out[k * PITCH + lane] - largest, e = exp_real(shifted);
      if (k == label) chosen = shifted;
      out[k * PITCH + lane] = e, normaliser += e;
    }
    const REAL normalised_weight = divide(w, normaliser);
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      REAL* z = out + k * PITCH + lane;
      *z = valid ? (k == label ? w : REAL(0)) - *z * normalised_weight : REAL(0);
    }
    return want_value && valid ? double(chosen) - log(double(normaliser)) : 0.0;
  }
#pragma unroll
  for (int k = 0; k < TARGETS; ++k) {
    REAL* z = out + k * PITCH + lane;
    const REAL y = valid ? args.y[k * args.padded + row] : REAL(0);
    if (KIND == GAUSSIAN) {
      const bool learned = LOG_SCALE >= 0;
      const int slot = LOG_SCALE + (PER_TARGET ? k : 0);
      const REAL scale = learned ? exp_real(theta[learned ? slot : 0]) : REAL(args.scale[k]);
      const REAL precision = divide(REAL(1), scale * scale), residual = y - *z;
      *z = valid ? residual * precision * w : REAL(0);
      if (learned && valid) scale_gradient[PER_TARGET ? k : 0] += w * (residual * residual * precision - REAL(1));
      if (want_value && valid) {
        const double log_scale = learned ? double(theta[learned ? slot : 0]) : log(args.scale[k]);
        value += -0.5 * double(residual) * double(residual) * exp(-2 * log_scale) - log_scale - HALF_LOG_TWO_PI;
      }
    } else if (KIND == HETEROSCEDASTIC) {
      REAL* log_variance = out + (TARGETS + k) * PITCH + lane;
      const REAL v = *log_variance, residual = y - *z, scaled = residual * exp_real(-v);
      if (want_value && valid) value += -0.5 * (double(residual * scaled) + double(v)) - HALF_LOG_TWO_PI;
      *z = valid ? w * scaled : REAL(0);
      *log_variance = valid ? REAL(0.5) * w * (residual * scaled - REAL(1)) : REAL(0);
    } else {
      const double logit = double(*z);
      if (want_value && valid)
        value += double(y) * logit - (logit > 0 ? logit + log1p(exp(-logit)) : log1p(exp(logit)));
      *z = valid ? w * (y - logistic(*z)) : REAL(0);
    }
  }
  return value;
}

// -- a chain -------------------------------------------------------------------------------------------------------
constexpr int LEARNED = LOG_SCALE < 0 ? 0 : PER_TARGET ? TARGETS : 1;
constexpr int THREADS = 32 * BLOCK_WARPS;

// A barrier of all blocks of a chain.
__device__ inline void sync_blocks(unsigned* counter, unsigned& arrived) {
  if (BLOCKS == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    arrived += BLOCKS;
    __threadfence();
    atomicAdd(counter, 1u);
    while (*(volatile unsigned*)counter < arrived) PAUSE;
    __threadfence();
  }
  __syncthreads();
}

// Integrator steps of every chain, in place; a chain with steps < 0 is evaluated where it is.
extern "C" __global__ void __launch_bounds__(THREADS, 1) trajectories(Arguments args) {
  SHARED(shared);
  REAL* position = reinterpret_cast<REAL*>(shared);  // [slot], like momentum and grad
  REAL *momentum = position + SLOTS, *grad = momentum + SLOTS, *warp_memory = grad + SLOTS;
  double* values = reinterpret_cast<double*>(warp_memory + WARPS * WARP_MEMORY);
  int* offset = reinterpret_cast<int*>(values + WARPS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x % BLOCKS;
  const long long chain = blockIdx.x / BLOCKS, start = chain * args.dim;
  const long long tiles = args.padded / 32, stride = WARPS * BLOCKS, first_tile = block * WARPS + warp;
  // Sums overwrite the values, after the inputs.
  REAL *memory = warp_memory + warp * WARP_MEMORY, *warp_sums = memory + INPUT_SIZE;
  REAL *partial = args.partial + chain * (BLOCKS + 1) * SLOTS, *total = partial + BLOCKS * SLOTS;
  double *partial_value = args.partial_value + chain * BLOCKS, *log_likelihood = args.log_likelihood;
  const REAL* inverse_mass = args.inverse_mass;
  unsigned arrived = 0;
  for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
    const int d = args.offset[p];
    offset[p] = d;
    position[p] = d < 0 ? REAL(0) : args.theta[start + d];
    momentum[p] = d < 0 ? REAL(0) : args.momentum[start + d];
    grad[p] = d < 0 ? REAL(0) : args.gradient[start + d];
  }
  const REAL size = args.step_size[chain];
  const int steps = args.steps[chain];
  const bool evaluate_only = steps < 0;
  const long long count = evaluate_only ? 1 : (long long)steps * DRIFTS;
  bool loaded = false;  // whether the inputs of the warp's rows are in its memory
  for (long long s = 0; s < count; ++s) {
    const int stage = int(s % DRIFTS);
    if (!evaluate_only) {
      const REAL push = stage == 0 ? REAL(args.kick[0]) * size : REAL(0), move = REAL(args.drift[stage]) * size;
      for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
        if (offset[p] < 0) continue;
        const REAL m = momentum[p] + push * grad[p];
        momentum[p] = m;
        position[p] += move * (inverse_mass ? m * inverse_mass[offset[p]] : m);
      }
    }
    __syncthreads();
    const bool want_value = s + 1 == count;
    double value = 0;
    if (warp < WARPS) {
      Layers<0> layers;
      REAL scale_gradient[LEARNED + 1];
      layers.clear();
#pragma unroll
      for (int k = 0; k < LEARNED; ++k) scale_gradient[k] = 0;
#pragma unroll 1
      for (long long tile = first_tile; tile < tiles; tile += stride) {
        const long long row = tile * 32 + lane;
        if (!loaded || stride < tiles)
#pragma unroll 4
          for (int i = 0; i < IN[0]; ++i) memory[i * PITCH + lane] = args.x[i * args.padded + row];
        loaded = true;
        __syncwarp();
        layers.forward(position, memory, lane);
        value += likelihood(args, position, memory + VALUES[LAYERS - 1], row, lane, want_value, scale_gradient);
        __syncwarp();
        layers.backward(position, memory, lane);
        __syncwarp();
      }
      layers.store(warp_sums, lane);
#pragma unroll
      for (int k = 0; k < LEARNED; ++k) {
        REAL sum = scale_gradient[k];
        for (int far = 16; far; far /= 2) sum += __shfl_down_sync(~0u, sum, far);
        if (lane == 0) warp_sums[LOG_SCALE + k] = sum;
      }
      if (want_value) {
        for (int far = 16; far; far /= 2) value += __shfl_down_sync(~0u, value, far);
        if (lane == 0) values[warp] = value;
      }
    }
    __syncthreads();
    for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
      if (offset[p] < 0) continue;
      REAL sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += warp_memory[w * WARP_MEMORY + INPUT_SIZE + p];
      if (BLOCKS > 1) partial[block * SLOTS + p] = sum;
      grad[p] = sum;
    }
    if (want_value && threadIdx.x == 0) {
      double sum = 0;
      for (int w = 0; w < WARPS; ++w) sum += values[w];
      if (BLOCKS > 1) partial_value[block] = sum;
      else log_likelihood[chain] = sum;
    }
    if (BLOCKS > 1) {
      sync_blocks(args.arrivals + chain, arrived);
      // Each block adds up a part of the slots over all blocks. Its warps take some blocks each, in parallel, to hide
      // the latency of loads.
      constexpr int SLOTS_PER_BLOCK = ceil_div(SLOTS, BLOCKS);
      constexpr int ADDING_WARPS = BLOCKS < BLOCK_WARPS ? BLOCKS : BLOCK_WARPS;
      REAL* sums = warp_memory + INPUT_SIZE;  // [warp][slot of this block]
      for (int p = lane; p < SLOTS_PER_BLOCK && block * SLOTS_PER_BLOCK + p < SLOTS && warp < ADDING_WARPS; p += 32) {
        REAL sum = 0;
#pragma unroll 16
        for (int g = warp; g < BLOCKS; g += ADDING_WARPS)
          sum += load_uncached(partial + g * SLOTS + block * SLOTS_PER_BLOCK + p);
        sums[warp * SLOTS_PER_BLOCK + p] = sum;
      }
      __syncthreads();
      for (int p = threadIdx.x; p < SLOTS_PER_BLOCK && block * SLOTS_PER_BLOCK + p < SLOTS; p += THREADS) {
        REAL sum = 0;
#pragma unroll
        for (int w = 0; w < ADDING_WARPS; ++w) sum += sums[w * SLOTS_PER_BLOCK + p];
        total[block * SLOTS_PER_BLOCK + p] = sum;
      }
      if (want_value && block == 0 && threadIdx.x == 0) {
        double sum = 0;
        for (int g = 0; g < BLOCKS; ++g) sum += load_uncached(partial_value + g);
        log_likelihood[chain] = sum;
      }
      sync_blocks(args.arrivals + chain, arrived);
      for (int p = threadIdx.x; p < SLOTS; p += THREADS)
        if (offset[p] >= 0) grad[p] = load_uncached(total + p);
    }
    const REAL after = evaluate_only ? REAL(0) : REAL(args.kick[stage + 1]) * size;
    for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
      if (offset[p] < 0) continue;
      const REAL g = grad[p] - (position[p] - args.loc[p]) * args.precision[p];
      grad[p] = g;
      momentum[p] += after * g;
    }
  }
  if (block != 0 || count == 0) return;
  for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
    const int d = offset[p];
    if (d < 0) continue;
    args.gradient[start + d] = grad[p];
    if (!evaluate_only) args.theta[start + d] = position[p], args.momentum[start + d] = momentum[p];
  }
}
