// Trajectories of small multilayer perceptrons on a GPU. A chain stays in one multiprocessor, or in a few that
// synchronise twice per gradient.
//
// A warp takes 32 rows at a time. In the forward and backward pass a lane is a row: values are [unit][row] in shared
// memory and a weight is one number for all lanes. For the gradient of the weights a lane is a unit: sums over rows
// stay in its registers until the warp has processed all of its rows. Sums of warps and blocks are added in a fixed
// order, so results are bit-for-bit reproducible.

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
