// Enough of CUDA to run a kernel on a CPU, with one thread per CUDA thread.
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <sched.h>
#include <thread>
#include <vector>

using std::exp, std::log, std::log1p, std::tanh;
#define EMULATED
#define __device__
#define __global__
#define __launch_bounds__(...)
#define PAUSE sched_yield()
#define SHARED(name) unsigned char* name = block_memory

struct Index { int x; };
struct Warp {
  std::barrier<> barrier{32};
  double exchanged[32];
};
inline thread_local Index threadIdx, blockIdx;
inline thread_local unsigned char* block_memory;
inline thread_local std::barrier<>* block_barrier;
inline thread_local Warp* current_warp;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { current_warp->barrier.arrive_and_wait(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
template <class T> inline T __shfl_down_sync(unsigned, T value, int far) {
  const int lane = threadIdx.x % 32;
  current_warp->exchanged[lane] = double(value);
  __syncwarp();
  const T result = T(current_warp->exchanged[lane + far < 32 ? lane + far : lane]);
  __syncwarp();
  return result;
}
template <class T> inline T load_uncached(const T* from) { return *const_cast<const volatile T*>(from); }
inline float exp_real(float v) { return std::exp(v); }
inline double exp_real(double v) { return std::exp(v); }
inline float divide(float a, float b) { return a / b; }
inline double divide(double a, double b) { return a / b; }

// Runs kernel(arguments...) with all blocks and threads at the same time.
template <class Kernel, class... Arguments>
void launch(int blocks, int threads, size_t shared, Kernel kernel, Arguments... arguments) {
  std::vector<std::thread> workers;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<unsigned char[]>> memories;
  for (int b = 0; b < blocks; ++b) {
    barriers.emplace_back(new std::barrier<>(threads));
    memories.emplace_back(new (std::align_val_t(16)) unsigned char[shared]);
    std::memset(memories.back().get(), 0xff, shared);  // nan, so that reading uninitialised memory shows
    for (int w = 0; w < threads / 32; ++w) warps.emplace_back(new Warp);
    for (int t = 0; t < threads; ++t) {
      Warp* warp = warps[b * (threads / 32) + t / 32].get();
      workers.emplace_back([=, barrier = barriers.back().get(), memory = memories.back().get()] {
        threadIdx.x = t, blockIdx.x = b, block_memory = memory, block_barrier = barrier, current_warp = warp;
        kernel(arguments...);
      });
    }
  }
  for (auto& thread : workers) thread.join();
}
