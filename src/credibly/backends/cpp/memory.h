// Memory aligned to cache lines, for SIMD vectors of any width.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#if defined(_WIN32)
#include <malloc.h>
#endif

namespace {

struct FreeAligned {
  void operator()(void* memory) const {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
  }
};

template <class T> using Aligned = std::unique_ptr<T, FreeAligned>;

// Returns memory for `count` values, or throws.
template <class T> Aligned<T> allocate_aligned(std::size_t count) {
  constexpr std::size_t LINE = 64;
  const std::size_t bytes = (count * sizeof(T) + LINE - 1) / LINE * LINE;
#if defined(_WIN32)
  void* memory = _aligned_malloc(bytes, LINE);
#else
  void* memory = nullptr;
  if (posix_memalign(&memory, LINE, bytes)) memory = nullptr;
#endif
  if (!memory) throw std::bad_alloc();
  return Aligned<T>(static_cast<T*>(memory));
}

}  // namespace
