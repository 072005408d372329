// Which of the compiled variants this processor can run.

#include <cstdint>

#include "api.h"

// Returns 0 for the baseline, 1 for AVX2 and 2 for AVX-512: the instructions that build.py compiles each variant with,
// as far as both the processor and the operating system support them.
EXPORTED int64_t cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx2 ? avx512 ? 2 : 1 : 0;
#else
  return 0;
#endif
}
