// Minibatch steps of wide multilayer perceptrons in float32, with updates that generate their own noise.
//
// A call takes all steps of one chain before the next, so its vectors stay in the caches, and reads each of them once
// per step. One thread computes a number from start to end, in an order set by the network and the batch alone: results
// depend neither on the number of threads nor on other chains.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "noise.h"
#include "thread_pool.h"
#include "wide_batch.h"
#include "wide_products.h"

namespace {

constexpr int64_t CHUNKS_PER_JOB = 128;

// The state of one chain and its updates, a chunk of every vector at a time.
class WideChain {
 public:
  WideChain(WideBatch& batch, const ChunkedPrior& prior, int64_t dim, const WideSteps& args, int64_t chain)
      : batch(batch), prior(prior), dim(dim), root(args.root), theta(args.theta + chain * dim),
        momentum(args.momentum + chain * dim), gradient(args.gradient + chain * dim) {}

  void run(const WideSteps& args, int64_t chain) {
    double sum = 0;
    for (int64_t k = 0; k < args.count; ++k) {
      const double *schedule = args.schedule + 4 * k, size = schedule[0], decay = schedule[2];
      const float half = float(0.5 * size), previous_half = k ? float(0.5 * schedule[-4]) : 0;
      const int64_t* rows = args.rows ? args.rows + (k * args.chains + chain) * args.batch : nullptr;
      const Keys& keys = args.keys[k * args.chains + chain];
      const bool last = k + 1 == args.count;
      update(keys, k > 0, previous_half, half, float(decay), float(std::sqrt(1 - decay * decay) * schedule[1]));
      sum = batch.evaluate(theta, gradient, rows, last);
      if (last) final_kick(half);
    }
    args.log_likelihood[chain] = sum * (args.rows ? args.scale : 1.0);
  }

 private:
  // Second kick of the previous step (if `pending`), then this step up to its gradient. `evaluate` omits the prior.
  void update(const Keys& keys, bool pending, float previous_half, float half, float decay, float noise_scale) {
    for_chunks([=, &keys](int64_t c, float* w, float* m, float* g) {
      Reals noise[CHUNK / L];
      normals(keys, c, noise);
      for (int v = 0; v < CHUNK / L; ++v) {
        Reals at = load(w + v * L), p = load(m + v * L), grad = load(g + v * L);
        if (pending) grad = add_prior(c, v, at, grad), p += previous_half * scaled(c, v, grad);
        p += half * scaled(c, v, grad);
        at += half * scaled(c, v, p);
        p = decay * p + noise_scale * noise[v];
        at += half * scaled(c, v, p);
        store(w + v * L, at), store(m + v * L, p);
      }
    });
  }
  void final_kick(float half) {
    for_chunks([=](int64_t c, float* w, float* m, float* g) {
      for (int v = 0; v < CHUNK / L; ++v) {
        const Reals grad = add_prior(c, v, load(w + v * L), load(g + v * L));
        store(g + v * L, grad), store(m + v * L, load(m + v * L) + half * scaled(c, v, grad));
      }
    });
  }
  // Multiplies vector v of chunk c by the square root of the preconditioner.
  Reals scaled(int64_t c, int v, Reals values) const { return root ? load(root + c * CHUNK + v * L) * values : values; }
  // Adds the gradient of the log prior to vector v of chunk c.
  Reals add_prior(int64_t c, int v, Reals at, Reals grad) const {
    const float loc = prior.chunk_loc[c], precision = prior.chunk_precision[c];
    if (precision == precision) return grad - (at - loc) * precision;
    const int64_t d = c * CHUNK + v * L;
    return grad - (at - load(prior.loc + d)) * load(prior.precision + d);
  }

  // Calls task(chunk, theta, momentum, gradient) for every chunk; an incomplete last chunk is copied into a whole one.
  template <class Task> void for_chunks(Task task) {
    const int64_t chunks = (dim + CHUNK - 1) / CHUNK;
    batch.parallel_for((chunks + CHUNKS_PER_JOB - 1) / CHUNKS_PER_JOB, [&](int, int64_t job) {
      for (int64_t c = job * CHUNKS_PER_JOB; c < chunks && c < (job + 1) * CHUNKS_PER_JOB; ++c) {
        const int64_t d = c * CHUNK;
        if (d + CHUNK <= dim) {
          task(c, theta + d, momentum + d, gradient + d);
          continue;
        }
        float copies[3][CHUNK] = {}, *vectors[3] = {theta, momentum, gradient};
        for (int k = 0; k < 3; ++k) std::memcpy(copies[k], vectors[k] + d, (dim - d) * sizeof(float));
        task(c, copies[0], copies[1], copies[2]);
        for (int k = 0; k < 3; ++k) std::memcpy(vectors[k] + d, copies[k], (dim - d) * sizeof(float));
      }
    });
  }

  WideBatch& batch;
  const ChunkedPrior& prior;
  int64_t dim;
  const float* root;
  float *theta, *momentum, *gradient;
};

}  // namespace

// One thread per chain if chains are small, many or a multiple of the threads; else all threads on one chain after
// another.
EXPORTED int64_t wide_steps(const WideDensity* density, const WideSteps* args) try {
  const int64_t chains = args->chains;
  ThreadPool pool(args->single_thread && chains < args->threads ? chains : args->threads);
  const int64_t D = density->network.dim, threads = pool.size();
  const bool parallel_chains = args->single_thread || chains % threads == 0 || chains >= 4 * threads;
  const double weight = density->data.weight * (args->rows ? args->scale : 1.0);
  std::vector<std::unique_ptr<WideBatch>> batches;
  for (int64_t g = 0; g < (parallel_chains ? threads : 1); ++g)
    batches.emplace_back(new WideBatch(*density, args->batch, weight, parallel_chains ? nullptr : &pool));
  auto task = [&](int thread, int64_t c) { WideChain(*batches[thread], density->prior, D, *args, c).run(*args, c); };
  if (parallel_chains)
    pool.run(chains, task);
  else
    for (int64_t c = 0; c < chains; ++c) task(0, c);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

EXPORTED int64_t fill_normal(const Normals* args) {
  ThreadPool pool(args->threads);
  const int64_t chunks = args->count / CHUNK, jobs = (chunks + CHUNKS_PER_JOB - 1) / CHUNKS_PER_JOB;
  pool.run(jobs, [&](int, int64_t job) {
    Reals numbers[CHUNK / L];
    for (int64_t c = job * CHUNKS_PER_JOB; c < chunks && c < (job + 1) * CHUNKS_PER_JOB; ++c) {
      normals(args->keys, c, numbers);
      for (int v = 0; v < CHUNK / L; ++v) store(args->out + c * CHUNK + v * L, numbers[v]);
    }
  });
  return 0;
}
