// Mean and variance over draws for every column of a table, with sums in double. Columns are processed in strips that
// stay in the L2 cache between the two passes.

#include <cstdint>
#include <new>

#include "api.h"
#include "thread_pool.h"

namespace {

// Columns of a strip. Columns are independent of each other, so the number of threads does not affect any result.
constexpr int64_t STRIP = 256;

template <class T>
void strip_moments(const T* values, int64_t draws, int64_t columns, int64_t width, double* mean, double* variance) {
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
      const T residual = values[s * columns + c] - centre[c];
      squares[c] += residual * residual;
    }
  for (int64_t c = 0; c < width; ++c) variance[c] = squares[c] / double(draws);
}

template <class T> int64_t moments(const Moments<T>& args) try {
  ThreadPool pool(args.threads);
  pool.run((args.columns + STRIP - 1) / STRIP, [&](int, int64_t job) {
    const int64_t first = job * STRIP, width = args.columns - first < STRIP ? args.columns - first : STRIP;
    strip_moments<T>(args.values + first, args.draws, args.columns, width, args.mean + first, args.variance + first);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace

EXPORTED int64_t moments_f32(const Moments<float>* args) { return moments(*args); }
EXPORTED int64_t moments_f64(const Moments<double>* args) { return moments(*args); }
