// Enough of CUDA to run a kernel on a processor: a thread for every thread of a block, barriers where it has them.
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

struct Place { int x; };
struct Warp {
  std::barrier<> meeting{32};
  double held[32];
};
inline thread_local Place threadIdx, blockIdx;
inline thread_local unsigned char* block_memory;
inline thread_local std::barrier<>* block_meeting;
inline thread_local Warp* own_warp;

inline void __syncthreads() { block_meeting->arrive_and_wait(); }
inline void __syncwarp() { own_warp->meeting.arrive_and_wait(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned* at, unsigned more) { return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST); }
template <class T> inline T __shfl_down_sync(unsigned, T value, int far) {
  const int lane = threadIdx.x % 32;
  own_warp->held[lane] = double(value);
  __syncwarp();
  const T found = T(own_warp->held[lane + far < 32 ? lane + far : lane]);
  __syncwarp();
  return found;
}
template <class T> inline T fresh(const T* from) { return *const_cast<const volatile T*>(from); }
inline float e_to(float v) { return std::exp(v); }
inline double e_to(double v) { return std::exp(v); }
inline float over(float a, float b) { return a / b; }
inline double over(double a, double b) { return a / b; }

// Runs kernel(arguments...) on so many blocks of so many threads, all at once.
template <class Kernel, class... Arguments>
void launch(int blocks, int threads, size_t shared, Kernel kernel, Arguments... arguments) {
  std::vector<std::thread> crew;
  std::vector<std::unique_ptr<std::barrier<>>> meetings;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<unsigned char[]>> memories;
  for (int b = 0; b < blocks; ++b) {
    meetings.emplace_back(new std::barrier<>(threads));
    memories.emplace_back(new (std::align_val_t(16)) unsigned char[shared]);
    std::memset(memories.back().get(), 0xff, shared);  // not a number, wherever something is read that was not written
    for (int w = 0; w < threads / 32; ++w) warps.emplace_back(new Warp);
    for (int t = 0; t < threads; ++t) {
      Warp* warp = warps[b * (threads / 32) + t / 32].get();
      crew.emplace_back([=, meeting = meetings.back().get(), memory = memories.back().get()] {
        threadIdx.x = t, blockIdx.x = b, block_memory = memory, block_meeting = meeting, own_warp = warp;
        kernel(arguments...);
      });
    }
  }
  for (auto& thread : crew) thread.join();
}
