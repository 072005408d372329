// Forward and backward pass of the layers for the 32 rows of a warp.

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
