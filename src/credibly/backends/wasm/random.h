// Random streams named by (seed, purpose, indices): the counter-based numbers of backends/cpp/noise.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "../cpp/noise.h"

namespace {

enum Purpose : uint64_t { INITIAL, MOMENTUM, ACCEPT, LENGTH, SEARCH, RESTART, DROPOUT, PASS };

class Stream {
 public:
  Stream(uint64_t seed, Purpose purpose, std::initializer_list<uint64_t> indices = {}) : keys{mix(seed), purpose} {
    for (uint64_t index : indices) {
      keys.first = mix(keys.first + index);
      keys.second = mix(keys.second ^ keys.first);
    }
    keys.second = mix(keys.second + 1);
  }

  // Standard normal numbers from the start of the stream.
  void normal(float* out, int64_t count) const {
    Reals block[CHUNK / Lanes<float>::N];
    for (int64_t first = 0; first < count; first += CHUNK) {
      normals(keys, first / CHUNK, block);
      const int64_t size = count - first < CHUNK ? count - first : CHUNK;
      std::memcpy(out + first, block, size * sizeof(float));
    }
  }

  // Number `index` of the stream, uniform in [0, 1).
  double uniform(uint64_t index = 0) const {
    const Words words = random_words(keys, index);
    return double(uint64_t(words[0]) >> 11) * 0x1p-53;
  }

 private:
  // The finaliser of SplitMix64.
  static uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  Keys keys;
};

}  // namespace
