// Threads that share jobs.
#pragma once

#include <cstdint>
#include <functional>
#if !defined(__wasm__)
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>
#endif

namespace {

#if defined(__wasm__)

// A web worker is one thread.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t) {}
  ThreadPool(const ThreadPool&) = delete;
  int size() const { return 1; }
  void run(int64_t count, const std::function<void(int, int64_t)>& task) {
    for (int64_t j = 0; j < count; ++j) task(0, j);
  }
};

#else

// Threads for the duration of one call. They yield while waiting, so a loaded machine loses nothing to them, and none
// outlives the call, so the process may fork.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t wanted) {
    try {
      for (int64_t i = 1; i < wanted; ++i) threads.emplace_back([this, i] { serve(int(i)); });
    } catch (const std::system_error&) {  // run with the threads that could be started
    }
  }
  ~ThreadPool() {
    stop.store(true);
    round.fetch_add(1);
    for (auto& thread : threads) thread.join();
  }
  ThreadPool(const ThreadPool&) = delete;
  int size() const { return int(threads.size()) + 1; }

  // Calls task(thread, job) for every job; idle threads take the next one.
  void run(int64_t count, const std::function<void(int, int64_t)>& task) {
    if (threads.empty() || count == 1) {
      for (int64_t j = 0; j < count; ++j) task(0, j);
      return;
    }
    current = &task, total = count, next.store(0), busy.store(int(threads.size()));
    round.fetch_add(1);
    take_jobs(0);
    for (int spins = 0; busy.load(); ++spins) pause(spins);
  }

 private:
  void serve(int thread) {
    for (int seen = 0;;) {
      for (int spins = 0; round.load() == seen; ++spins) pause(spins);
      ++seen;
      if (stop.load()) return;
      take_jobs(thread);
      busy.fetch_sub(1);
    }
  }
  void take_jobs(int thread) {
    for (int64_t j; (j = next.fetch_add(1)) < total;) (*current)(thread, j);
  }
  static void pause(int spins) {
    if (spins > 100) std::this_thread::yield();
  }
  std::vector<std::thread> threads;
  std::atomic<int> round{0}, busy{0};
  std::atomic<bool> stop{false};
  std::atomic<int64_t> next{0};
  int64_t total = 0;
  const std::function<void(int, int64_t)>* current = nullptr;
};

#endif

}  // namespace
