// Trajectories of small multilayer perceptrons on a GPU: a chain stays in one multiprocessor, or in a few that meet twice a gradient.
//
// A warp takes 32 rows at a time. On the way through the network and back a lane is a row: values are [unit][row] in shared
// memory and a weight is one number for all lanes. For the gradient of the weights a lane is a unit: sums over rows stay in its
// registers until the warp has had all of its rows. What warps and blocks have found is added in their order, so that a run gives
// the same bits every time.
//
// The sizes come before this text as constants (gpu.py): REAL, LAYERS, IN, OUT, ACT (of each layer), WEIGHT, BIAS (their places in a
// parameter vector whose rows are padded to whole 16 bytes), SLOTS (its length), KIND, TARGETS, LOG_SCALE (place or -1),
// PER_TARGET, WARPS (of a block, that take rows), TEAM (with those that only add up), GROUP (blocks of a chain), INPUT, PLACE, SLOPE (of each layer, in a warp's memory), SPACE (of a warp), DRIFTS.

enum { NONE, RELU, TANH, SILU, SIGMOID };
enum { GAUSSIAN, HETEROSCEDASTIC, CATEGORICAL, BERNOULLI };

constexpr int PACK = 16 / int(sizeof(REAL));       // numbers in one load
constexpr int PITCH = 32 + PACK;                   // from one unit to the next: loads along units and along rows miss each other's banks
constexpr int MOST = 28;                           // sums that a lane keeps on the way through a layer
constexpr double HALF_LOG_TWO_PI = 0.91893853320467274178;

struct alignas(16) Pack { REAL at[PACK]; };
__device__ inline Pack load(const REAL* from) { return *reinterpret_cast<const Pack*>(from); }
__device__ constexpr int parts(int all, int most) { return (all + most - 1) / most; }

struct Data {
  const REAL* x;            // [input][padded row]
  const REAL* y;            // [target][padded row]
  const REAL* loc;          // of the prior, in slots
  const REAL* precision;
  const double* scale;      // [target], where fixed
  const int* flat;          // place of a slot in a parameter vector, or -1
  long long rows, padded, dim;
  double weight;            // 1 / temperature of the likelihood
  double kick[DRIFTS + 1], drift[DRIFTS];
};

#ifndef EMULATED
__device__ inline float e_to(float v) { return expf(v); }
__device__ inline double e_to(double v) { return exp(v); }
__device__ inline float over(float a, float b) { return __fdividef(a, b); }
__device__ inline double over(double a, double b) { return a / b; }
#endif
__device__ inline REAL logistic(REAL v) { return over(REAL(1), REAL(1) + e_to(-(v > REAL(-80) ? v : REAL(-80)))); }

template <int KIND_OF> __device__ inline void activate(REAL a, REAL& value, REAL& slope) {
  if (KIND_OF == RELU) {
    value = a > REAL(0) ? a : REAL(0), slope = a > REAL(0) ? REAL(1) : REAL(0);
  } else if (KIND_OF == TANH) {
    value = tanh(a), slope = REAL(1) - value * value;
  } else if (KIND_OF == SILU) {
    const REAL s = logistic(a);
    value = a * s, slope = s * (REAL(1) + a * (REAL(1) - s));
  } else if (KIND_OF == SIGMOID) {
    value = logistic(a), slope = value * (REAL(1) - value);
  } else {
    value = a, slope = REAL(1);
  }
}

// -- the gradient of one layer's weights, summed over the rows of a warp ------------------------------------------------------
// Lanes are the units after the layer, or those before it where these are more.
template <int L> struct Sums {
  static constexpr bool AFTER = OUT[L] >= IN[L];
  static constexpr int EACH = parts(AFTER ? OUT[L] : IN[L], 32), OTHER = AFTER ? IN[L] : OUT[L];
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

  __device__ void add(const REAL* before, const REAL* delta, int lane) {
    const REAL* mine = AFTER ? delta : before;
    const REAL* theirs = AFTER ? before : delta;
    constexpr int UNITS = AFTER ? OUT[L] : IN[L];
#pragma unroll 1
    for (int r = 0; r < 32; r += PACK) {
      Pack own[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int unit = lane + 32 * e;
        own[e] = load(mine + (unit < UNITS ? unit : UNITS - 1) * PITCH + r);
        if (AFTER && BIAS[L] >= 0)
#pragma unroll
          for (int k = 0; k < PACK; ++k) bias[e] += own[e].at[k];
      }
#pragma unroll
      for (int o = 0; o < OTHER; ++o) {
        const Pack other = load(theirs + o * PITCH + r);
#pragma unroll
        for (int k = 0; k < PACK; ++k)
#pragma unroll
          for (int e = 0; e < EACH; ++e) weight[e][o] += own[e].at[k] * other.at[k];
      }
    }
    if (!AFTER && BIAS[L] >= 0)
#pragma unroll
      for (int b = 0; b < BIASES; ++b) bias[b] += delta[b * PITCH + lane];
  }

  __device__ void store(REAL* into, int lane) {
    constexpr int WIDE = parts(IN[L], PACK) * PACK, UNITS = AFTER ? OUT[L] : IN[L];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int unit = lane + 32 * e;
      if (unit >= UNITS) continue;
#pragma unroll
      for (int o = 0; o < OTHER; ++o) into[WEIGHT[L] + (AFTER ? unit * WIDE + o : o * WIDE + unit)] = weight[e][o];
      if (AFTER && BIAS[L] >= 0) into[BIAS[L] + unit] = bias[e];
    }
    if (!AFTER && BIAS[L] >= 0)
#pragma unroll
      for (int b = 0; b < BIASES; ++b) {
        REAL sum = bias[b];
        for (int far = 16; far; far /= 2) sum += __shfl_down_sync(~0u, sum, far);
        if (lane == 0) into[BIAS[L] + b] = sum;
      }
  }
};

// -- one layer for 32 rows ----------------------------------------------------------------------------------------------------
template <int L> __device__ inline void through(const REAL* theta, REAL* space, int lane) {
  constexpr int WIDE = parts(IN[L], PACK) * PACK, MANY = parts(OUT[L], parts(OUT[L], MOST));
  const REAL *before = space + INPUT[L], *weights = theta + WEIGHT[L];
#pragma unroll 1
  for (int first = 0; first < OUT[L]; first += MANY) {
    REAL sum[MANY];  // the last round may read past the layer's weights, into what follows them, and drops what comes of it
    const REAL* row = weights + first * WIDE;
#pragma unroll
    for (int j = 0; j < MANY; ++j) sum[j] = BIAS[L] >= 0 ? theta[BIAS[L] + first + j] : REAL(0);
    int i = 0;
#pragma unroll 2
    for (; i + PACK <= IN[L]; i += PACK) {
      REAL value[PACK];
#pragma unroll
      for (int k = 0; k < PACK; ++k) value[k] = before[(i + k) * PITCH + lane];
#pragma unroll
      for (int j = 0; j < MANY; ++j) {
        const Pack w = load(row + j * WIDE + i);
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum[j] += w.at[k] * value[k];
      }
    }
#pragma unroll
    for (int k = IN[L] / PACK * PACK; k < IN[L]; ++k) {
      const REAL value = before[k * PITCH + lane];
#pragma unroll
      for (int j = 0; j < MANY; ++j) sum[j] += row[j * WIDE + k] * value;
    }
#pragma unroll
    for (int j = 0; j < MANY; ++j) {
      if (first + j >= OUT[L]) continue;
      REAL value, slope;
      activate<ACT[L]>(sum[j], value, slope);
      space[PLACE[L] + (first + j) * PITCH + lane] = value;
      if (ACT[L] != NONE) space[SLOPE[L] + (first + j) * PITCH + lane] = slope;
    }
  }
}

// From the derivative by the values after layer L to that by the sums before the activation of the layer before it, in SLOPE[L - 1].
template <int L> __device__ inline void back(const REAL* theta, REAL* space, const REAL* delta, int lane) {
  constexpr int WIDE = parts(IN[L], PACK) * PACK, MANY = parts(parts(IN[L], PACK), parts(IN[L], MOST)) * PACK;
  const REAL* weights = theta + WEIGHT[L];
#pragma unroll 1
  for (int first = 0; first < IN[L]; first += MANY) {
    REAL sum[MANY];
#pragma unroll
    for (int i = 0; i < MANY; ++i) sum[i] = 0;
#pragma unroll 2
    for (int j = 0; j < OUT[L]; ++j) {
      const REAL d = delta[j * PITCH + lane];
#pragma unroll
      for (int i = 0; i < MANY; i += PACK) {
        const Pack w = load(weights + j * WIDE + first + i);
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum[i + k] += w.at[k] * d;
      }
    }
#pragma unroll
    for (int i = 0; i < MANY; ++i)
      if (first + i < IN[L]) {
        REAL* slope = space + SLOPE[L - 1] + (first + i) * PITCH + lane;
        *slope = ACT[L - 1] != NONE ? sum[i] * *slope : sum[i];
      }
  }
}

// Layers L and on: through them, the likelihood, and back; their sums are added to.
template <int L> struct Layers {
  Sums<L> sums;
  Layers<L + 1> rest;
  __device__ void clear() { sums.clear(), rest.clear(); }
  __device__ void forward(const REAL* theta, REAL* space, int lane) {
    through<L>(theta, space, lane);
    rest.forward(theta, space, lane);
  }
  __device__ void backward(const REAL* theta, REAL* space, int lane) {
    rest.backward(theta, space, lane);
    REAL* delta = space + (L + 1 == LAYERS ? PLACE[L] : SLOPE[L]);
    if constexpr (L > 0) back<L>(theta, space, delta, lane);
    __syncwarp();
    sums.add(space + INPUT[L], delta, lane);
  }
  __device__ void store(REAL* into, int lane) { sums.store(into, lane), rest.store(into, lane); }
};
template <> struct Layers<LAYERS> {
  __device__ void clear() {}
  __device__ void forward(const REAL*, REAL*, int) {}
  __device__ void backward(const REAL*, REAL*, int) {}
  __device__ void store(REAL*, int) {}
};

// -- likelihoods --------------------------------------------------------------------------------------------------------------
// Turns a row's outputs into the derivative of its log likelihood; returns that where `wanted`. Derivatives by log scales add to `by_scale`.
__device__ inline double likelihood(const Data& data, const REAL* theta, REAL* out, long long row, int lane, bool wanted, REAL* by_scale) {
  const bool there = row < data.rows;
  const REAL w = REAL(data.weight);
  double value = 0;
  if (KIND == CATEGORICAL) {
    const int label = there ? int(data.y[row]) : 0;
    REAL top = out[lane], mass = 0, chosen = 0;
#pragma unroll 1
    for (int k = 1; k < TARGETS; ++k) top = out[k * PITCH + lane] > top ? out[k * PITCH + lane] : top;
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      const REAL above = out[k * PITCH + lane] - top, e = e_to(above);
      if (k == label) chosen = above;
      out[k * PITCH + lane] = e, mass += e;
    }
    const REAL share = over(w, mass);
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      REAL* z = out + k * PITCH + lane;
      *z = there ? (k == label ? w : REAL(0)) - *z * share : REAL(0);
    }
    return wanted && there ? double(chosen) - log(double(mass)) : 0.0;
  }
#pragma unroll
  for (int k = 0; k < TARGETS; ++k) {
    REAL* z = out + k * PITCH + lane;
    const REAL y = there ? data.y[k * data.padded + row] : REAL(0);
    if (KIND == GAUSSIAN) {
      const bool learned = LOG_SCALE >= 0;
      const int place = LOG_SCALE + (PER_TARGET ? k : 0);
      const REAL spread = learned ? e_to(theta[learned ? place : 0]) : REAL(data.scale[k]);
      const REAL precision = over(REAL(1), spread * spread), gap = y - *z;
      *z = there ? gap * precision * w : REAL(0);
      if (learned && there) by_scale[PER_TARGET ? k : 0] += w * (gap * gap * precision - REAL(1));
      if (wanted && there) {
        const double log_scale = learned ? double(theta[learned ? place : 0]) : log(data.scale[k]);
        value += -0.5 * double(gap) * double(gap) * exp(-2 * log_scale) - log_scale - HALF_LOG_TWO_PI;
      }
    } else if (KIND == HETEROSCEDASTIC) {
      REAL* spread = out + (TARGETS + k) * PITCH + lane;
      const REAL v = *spread, gap = y - *z, scaled = gap * e_to(-v);
      if (wanted && there) value += -0.5 * (double(gap * scaled) + double(v)) - HALF_LOG_TWO_PI;
      *z = there ? w * scaled : REAL(0);
      *spread = there ? REAL(0.5) * w * (gap * scaled - REAL(1)) : REAL(0);
    } else {
      const double logit = double(*z);
      if (wanted && there) value += double(y) * logit - (logit > 0 ? logit + log1p(exp(-logit)) : log1p(exp(logit)));
      *z = there ? w * (y - logistic(*z)) : REAL(0);
    }
  }
  return value;
}

// -- a chain ------------------------------------------------------------------------------------------------------------------
constexpr int LEARNED = LOG_SCALE < 0 ? 0 : PER_TARGET ? TARGETS : 1;
constexpr int THREADS = 32 * TEAM;

// All blocks of a chain wait for each other.
__device__ inline void meet(unsigned* counter, unsigned& reached) {
  if (GROUP == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    reached += GROUP;
    __threadfence();
    atomicAdd(counter, 1u);
    while (*(volatile unsigned*)counter < reached) PAUSE;
    __threadfence();
  }
  __syncthreads();
}

// Steps of an integrator for every chain, in place; a chain with steps < 0 is evaluated where it stands.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
trajectories(Data data, REAL* theta, REAL* momentum, REAL* gradient, double* log_likelihood, const REAL* size, const REAL* inverse_mass,
             const int* steps, REAL* partial, double* partial_value, unsigned* counters) {
  SHARED(memory);
  REAL* here = reinterpret_cast<REAL*>(memory);                // the chain's position, momentum and gradient, in slots
  REAL *moving = here + SLOTS, *slope = moving + SLOTS, *spaces = slope + SLOTS;
  double* values = reinterpret_cast<double*>(spaces + WARPS * SPACE);
  int* flat = reinterpret_cast<int*>(values + WARPS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, me = blockIdx.x % GROUP;
  const long long chain = blockIdx.x / GROUP, start = chain * data.dim;
  const long long tiles = data.padded / 32, stride = WARPS * GROUP, mine = me * WARPS + warp;
  REAL *space = spaces + warp * SPACE, *own = space + INPUT_SIZE;  // sums lie where the values were, after the inputs
  partial += chain * (GROUP + 1) * SLOTS, partial_value += chain * GROUP;
  REAL* whole = partial + GROUP * SLOTS;
  unsigned reached = 0;
  for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
    const int d = data.flat[p];
    flat[p] = d;
    here[p] = d < 0 ? REAL(0) : theta[start + d];
    moving[p] = d < 0 ? REAL(0) : momentum[start + d];
    slope[p] = d < 0 ? REAL(0) : gradient[start + d];
  }
  const REAL step = size[chain];
  const long long count = steps[chain] < 0 ? 1 : (long long)steps[chain] * DRIFTS;
  const bool still = steps[chain] < 0;
  bool kept = false;  // whether the inputs of the warp's rows are in its memory already
  for (long long s = 0; s < count; ++s) {
    const int stage = int(s % DRIFTS);
    if (!still) {
      const REAL push = stage == 0 ? REAL(data.kick[0]) * step : REAL(0), move = REAL(data.drift[stage]) * step;
      for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
        if (flat[p] < 0) continue;
        const REAL m = moving[p] + push * slope[p];
        moving[p] = m;
        here[p] += move * (inverse_mass ? m * inverse_mass[flat[p]] : m);
      }
    }
    __syncthreads();
    const bool wanted = s + 1 == count;
    double value = 0;
    if (warp < WARPS) {
      Layers<0> layers;
      REAL by_scale[LEARNED + 1];
      layers.clear();
#pragma unroll
      for (int k = 0; k < LEARNED; ++k) by_scale[k] = 0;
#pragma unroll 1
      for (long long tile = mine; tile < tiles; tile += stride) {
        const long long row = tile * 32 + lane;
        if (!kept || stride < tiles)
#pragma unroll 4
          for (int i = 0; i < IN[0]; ++i) space[i * PITCH + lane] = data.x[i * data.padded + row];
        kept = true;
        __syncwarp();
        layers.forward(here, space, lane);
        value += likelihood(data, here, space + PLACE[LAYERS - 1], row, lane, wanted, by_scale);
        __syncwarp();
        layers.backward(here, space, lane);
        __syncwarp();
      }
      layers.store(own, lane);
#pragma unroll
      for (int k = 0; k < LEARNED; ++k) {
        REAL sum = by_scale[k];
        for (int far = 16; far; far /= 2) sum += __shfl_down_sync(~0u, sum, far);
        if (lane == 0) own[LOG_SCALE + k] = sum;
      }
      if (wanted) {
        for (int far = 16; far; far /= 2) value += __shfl_down_sync(~0u, value, far);
        if (lane == 0) values[warp] = value;
      }
    }
    __syncthreads();
    for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
      if (flat[p] < 0) continue;
      REAL sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += spaces[w * SPACE + INPUT_SIZE + p];
      if (GROUP > 1) partial[me * SLOTS + p] = sum;
      slope[p] = sum;
    }
    if (wanted && threadIdx.x == 0) {
      double sum = 0;
      for (int w = 0; w < WARPS; ++w) sum += values[w];
      if (GROUP > 1) partial_value[me] = sum;
      else log_likelihood[chain] = sum;
    }
    if (GROUP > 1) {
      meet(counters + chain, reached);
      // Each block adds up a share of the slots for all of them: its warps some blocks each, side by side, for a load takes long.
      constexpr int SHARE = parts(SLOTS, GROUP), FEW = GROUP < TEAM ? GROUP : TEAM;
      REAL* sums = spaces + INPUT_SIZE;  // [warp][slot of the share]
      for (int p = lane; p < SHARE && me * SHARE + p < SLOTS && warp < FEW; p += 32) {
        REAL sum = 0;
#pragma unroll 16
        for (int g = warp; g < GROUP; g += FEW) sum += fresh(partial + g * SLOTS + me * SHARE + p);
        sums[warp * SHARE + p] = sum;
      }
      __syncthreads();
      for (int p = threadIdx.x; p < SHARE && me * SHARE + p < SLOTS; p += THREADS) {
        REAL sum = 0;
#pragma unroll
        for (int w = 0; w < FEW; ++w) sum += sums[w * SHARE + p];
        whole[me * SHARE + p] = sum;
      }
      if (wanted && me == 0 && threadIdx.x == 0) {
        double sum = 0;
        for (int g = 0; g < GROUP; ++g) sum += fresh(partial_value + g);
        log_likelihood[chain] = sum;
      }
      meet(counters + chain, reached);
      for (int p = threadIdx.x; p < SLOTS; p += THREADS)
        if (flat[p] >= 0) slope[p] = fresh(whole + p);
    }
    const REAL after = still ? REAL(0) : REAL(data.kick[stage + 1]) * step;
    for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
      if (flat[p] < 0) continue;
      const REAL g = slope[p] - (here[p] - data.loc[p]) * data.precision[p];
      slope[p] = g;
      moving[p] += after * g;
    }
  }
  if (me != 0 || count == 0) return;
  for (int p = threadIdx.x; p < SLOTS; p += THREADS) {
    const int d = flat[p];
    if (d < 0) continue;
    gradient[start + d] = slope[p];
    if (!still) theta[start + d] = here[p], momentum[start + d] = moving[p];
  }
}
