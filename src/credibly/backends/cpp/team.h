// Threads that share out jobs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Some threads for the length of one call. They wait by giving way to others, so that a busy machine loses nothing to them, and
// none outlives the call, so that a process may fork.
class Team {
 public:
  explicit Team(int64_t wanted) {
    try {
      for (int64_t i = 1; i < wanted; ++i) threads.emplace_back([this, i] { serve(int(i)); });
    } catch (const std::system_error&) {  // as many as there are
    }
  }
  ~Team() {
    stop.store(true);
    round.fetch_add(1);
    for (auto& thread : threads) thread.join();
  }
  Team(const Team&) = delete;
  int size() const { return int(threads.size()) + 1; }

  // work(thread, job) for all jobs, whoever is free taking the next.
  void each(int64_t count, const std::function<void(int, int64_t)>& work) {
    if (threads.empty() || count == 1) {
      for (int64_t j = 0; j < count; ++j) work(0, j);
      return;
    }
    job = &work, total = count, next.store(0), busy.store(int(threads.size()));
    round.fetch_add(1);
    labour(0);
    for (int spins = 0; busy.load(); ++spins) pause(spins);
  }

 private:
  void serve(int me) {
    for (int seen = 0;;) {
      for (int spins = 0; round.load() == seen; ++spins) pause(spins);
      ++seen;
      if (stop.load()) return;
      labour(me);
      busy.fetch_sub(1);
    }
  }
  void labour(int me) {
    for (int64_t j; (j = next.fetch_add(1)) < total;) (*job)(me, j);
  }
  static void pause(int spins) {
    if (spins > 100) std::this_thread::yield();
  }
  std::vector<std::thread> threads;
  std::atomic<int> round{0}, busy{0};
  std::atomic<bool> stop{false};
  std::atomic<int64_t> next{0};
  int64_t total = 0;
  const std::function<void(int, int64_t)>* job = nullptr;
};

}  // namespace
