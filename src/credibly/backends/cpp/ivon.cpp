// IVON on one large network: a draw of the weights with noise generated in registers, and the update of one parameter,
// each in one pass over memory. `inference/kernels/ivon.py` has the equations.

#include <cmath>
#include <cstdint>

#include "api.h"
#include "noise.h"
#include "thread_pool.h"

namespace {

// Values of a job: a multiple of CHUNK, so that the numbers of a position do not depend on the jobs.
constexpr int64_t JOB = 1 << 15;
// The largest Newton step of a mean, as in `inference/kernels/ivon.py`.
constexpr float LIMIT = 0.1f;

int64_t jobs_of(int64_t count) { return (count + JOB - 1) / JOB; }

}  // namespace

EXPORTED int64_t gaussian_draw(const GaussianDraw* args) {
  ThreadPool pool(args->threads);
  pool.run(jobs_of(args->count), [&](int, int64_t job) {
    const int64_t end = args->count < (job + 1) * JOB ? args->count : (job + 1) * JOB;
    const float n = float(args->n), same = float(args->delta);
    alignas(BYTES) float numbers[CHUNK];
    for (int64_t first = job * JOB; first < end; first += CHUNK) {
      normals(args->keys, first / CHUNK, reinterpret_cast<Reals*>(numbers));
      const int64_t width = end - first < CHUNK ? end - first : CHUNK;
      const float *mean = args->mean + first, *curvature = args->curvature + first;
      float* out = args->out + first;
      if (args->deltas)
        for (int64_t k = 0; k < width; ++k)
          out[k] = mean[k] + numbers[k] / std::sqrt(n * (curvature[k] + args->deltas[first + k]));
      else
        for (int64_t k = 0; k < width; ++k)
          out[k] = mean[k] + numbers[k] / std::sqrt(n * (curvature[k] + same));
    }
  });
  return 0;
}

EXPORTED int64_t gaussian_update(const GaussianUpdate* args) {
  ThreadPool pool(args->threads);
  const float n = float(args->n), delta = float(args->delta), loc = float(args->loc), lr = float(args->lr);
  const float correction = float(args->correction), rate = float(args->rate);
  const float beta1 = float(args->beta1), fresh = float(1 - args->beta1);
  pool.run(jobs_of(args->count), [&](int, int64_t job) {
    const int64_t first = job * JOB, end = args->count < first + JOB ? args->count : first + JOB;
    float* __restrict mean = args->mean;
    float* __restrict curvature = args->curvature;
    float* __restrict momentum = args->momentum;
    const float* __restrict gradient = args->gradient;
    const float* __restrict drawn = args->drawn;
    for (int64_t i = first; i < end; ++i) {
      const float h = curvature[i], total = h + delta, g = gradient[i], m = mean[i];
      const float change = g * (drawn[i] - m) * n * total - h;
      const float next = h + rate * change + 0.5f * rate * rate * change * change / total;
      const float averaged = beta1 * momentum[i] + fresh * g;
      momentum[i] = averaged, curvature[i] = next;
      const float step = (averaged * correction + delta * (m - loc)) / (next + delta);
      const float most = LIMIT / std::sqrt(next + delta);
      mean[i] = m - lr * (step > most ? most : step < -most ? -most : step);
    }
  });
  return 0;
}
