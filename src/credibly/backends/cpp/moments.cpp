// Mean and mean square around it over the draws, for every column of a table: sums in double, a strip of columns at a time that
// stays in the second cache for the second look.

#include <cstdint>
#include <new>

#include "team.h"

namespace {

constexpr int64_t STRIP = 256;  // columns; each is by itself, so that threads change no bit

template <class T>
void strip(const T* values, int64_t draws, int64_t columns, int64_t width, double* mean, double* square) {
  double sum[STRIP] = {}, squares[STRIP] = {};
  T centre[STRIP];
  for (int64_t s = 0; s < draws; ++s)
    for (int64_t c = 0; c < width; ++c) sum[c] += values[s * columns + c];
  for (int64_t c = 0; c < width; ++c) {
    mean[c] = sum[c] / double(draws);
    centre[c] = T(mean[c]);
  }
  for (int64_t s = 0; s < draws; ++s)
    for (int64_t c = 0; c < width; ++c) {
      const T gap = values[s * columns + c] - centre[c];
      squares[c] += gap * gap;
    }
  for (int64_t c = 0; c < width; ++c) square[c] = squares[c] / double(draws);
}

// values[draw][column]
template <class T>
int64_t moments(const T* values, int64_t draws, int64_t columns, int64_t threads, double* mean, double* square) try {
  Team team(threads);
  team.each((columns + STRIP - 1) / STRIP, [&](int, int64_t job) {
    const int64_t first = job * STRIP, width = columns - first < STRIP ? columns - first : STRIP;
    strip<T>(values + first, draws, columns, width, mean + first, square + first);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                                    \
  extern "C" int64_t moments_##SUFFIX(const T* values, int64_t draws, int64_t columns, int64_t threads, double* mean,         \
                                      double* square) {                                                                       \
    return moments<T>(values, draws, columns, threads, mean, square);                                                         \
  }
EXPORT(float, f32)
EXPORT(double, f64)
