// Minibatch steps of wide multilayer perceptrons in float32, with updates that make their own noise.
//
// A chain goes through all steps of a call, so that its vectors stay in the caches, and each of them is read once a step. Every
// number is computed whole by one thread, in an order that only the network and the batch decide: threads change no bit, and
// neither do other chains.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "minibatch.h"
#include "network.h"
#include "noise.h"
#include "products.h"
#include "team.h"

namespace {

constexpr int64_t PIECE = 128;  // chunks of a job

struct WideSteps {
  int64_t count, friction;     // whether there is a momentum: SGHMC, else SGLD
  int64_t apart;               // whether a chain is too small for several threads
  const int64_t* rows;         // [step][chain][batch], or null for all rows in each
  int64_t batch;
  double scale;                // of a batch's likelihood to that of all rows
  const Keys* keys;            // [step][chain] of the noise
  const double* figures;       // [step][4]: step size, heat, share of the momentum that is kept, unused
};
// Centre and precision of every coordinate, and of every chunk where it has one of each; a precision of nan where it has more.
struct WidePrior {
  const float *loc, *precision, *chunk_loc, *chunk_precision;
};


// One chain: its vectors, and what a step does with 32 numbers of each.
class WideChain {
 public:
  WideChain(Batch& batch, const WidePrior& prior, int64_t dim, float* theta, float* momentum, float* gradient)
      : batch(batch), prior(prior), dim(dim), theta(theta), momentum(momentum), gradient(gradient) {}

  void run(const WideSteps& plan, int64_t chain, int64_t chains, double* value) {
    double sum = 0;
    for (int64_t k = 0; k < plan.count; ++k) {
      const double *figure = plan.figures + 4 * k, size = figure[0], kept = figure[2];
      const float half = float(0.5 * size), before = k ? float(0.5 * figure[-4]) : 0;
      const int64_t* rows = plan.rows ? plan.rows + (k * chains + chain) * plan.batch : nullptr;
      const Keys& keys = plan.keys[k * chains + chain];
      const bool last = k + 1 == plan.count;
      if (plan.friction) {
        diffuse(keys, k > 0, before, half, float(kept), float(std::sqrt(1 - kept * kept) * figure[1]));
        sum = batch.evaluate(theta, gradient, rows, last);
        if (last) finish(half);
      } else {
        sum = batch.evaluate(theta, gradient, rows, last);
        descend(keys, half, float(std::sqrt(size) * figure[1]));
      }
    }
    *value = sum * (plan.rows ? plan.scale : 1.0);
  }

 private:
  // The second kick of the step before and most of this one. The prior's part of the gradient is added to that of `evaluate`.
  void diffuse(const Keys& keys, bool bare, float before, float half, float hold, float spread) {
    each([=, &keys](int64_t c, float* w, float* m, float* g) {
      Reals noise[CHUNK / L];
      normals(keys, c, noise);
      for (int v = 0; v < CHUNK / L; ++v) {
        Reals at = load(w + v * L), p = load(m + v * L), slope = load(g + v * L);
        if (bare) slope = posterior(c, v, at, slope), p += before * slope;
        p += half * slope;
        at += half * p;
        p = hold * p + spread * noise[v];
        at += half * p;
        store(w + v * L, at), store(m + v * L, p);
      }
    });
  }
  void finish(float half) {
    each([=](int64_t c, float* w, float* m, float* g) {
      for (int v = 0; v < CHUNK / L; ++v) {
        const Reals slope = posterior(c, v, load(w + v * L), load(g + v * L));
        store(g + v * L, slope), store(m + v * L, load(m + v * L) + half * slope);
      }
    });
  }
  void descend(const Keys& keys, float half, float spread) {
    each([=, &keys](int64_t c, float* w, float*, float* g) {
      Reals noise[CHUNK / L];
      normals(keys, c, noise);
      for (int v = 0; v < CHUNK / L; ++v) {
        const Reals at = load(w + v * L), slope = posterior(c, v, at, load(g + v * L));
        store(w + v * L, at + (half * slope + spread * noise[v]));
      }
    });
  }
  Reals posterior(int64_t c, int v, Reals at, Reals slope) const {
    const float loc = prior.chunk_loc[c], precision = prior.chunk_precision[c];
    if (precision == precision) return slope - (at - loc) * precision;
    const int64_t d = c * CHUNK + v * L;
    return slope - (at - load(prior.loc + d)) * load(prior.precision + d);
  }

  // work(chunk, 32 numbers of each vector) for all chunks; the last numbers in copies that are as long.
  template <class Work> void each(Work work) {
    const int64_t chunks = (dim + CHUNK - 1) / CHUNK;
    batch.share((chunks + PIECE - 1) / PIECE, [&](int, int64_t job) {
      for (int64_t c = job * PIECE; c < chunks && c < (job + 1) * PIECE; ++c) {
        const int64_t d = c * CHUNK;
        if (d + CHUNK <= dim) {
          work(c, theta + d, momentum ? momentum + d : nullptr, gradient + d);
          continue;
        }
        float copies[3][CHUNK] = {}, *vectors[3] = {theta, momentum, gradient};
        for (int k = 0; k < 3; ++k)
          if (vectors[k]) std::memcpy(copies[k], vectors[k] + d, (dim - d) * sizeof(float));
        work(c, copies[0], copies[1], copies[2]);
        for (int k = 0; k < 3; ++k)
          if (vectors[k]) std::memcpy(vectors[k] + d, copies[k], (dim - d) * sizeof(float));
      }
    });
  }

  Batch& batch;
  const WidePrior& prior;
  int64_t dim;
  float *theta, *momentum, *gradient;
};

}  // namespace

// A thread for each chain where they are small, come out even or are many; else all threads for one after another.
extern "C" int64_t wide_steps(const Network* net, const Rows* data, const Table* table, const WidePrior* prior, int64_t chains,
                              int64_t threads, const WideSteps* plan, float* theta, float* momentum, float* gradient, double* value) try {
  Team team(plan->apart && chains < threads ? chains : threads);
  const int64_t D = net->dim, crew = team.size();
  const bool apart = plan->apart || chains % crew == 0 || chains >= 4 * crew;
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<std::vector<float>> slopes;  // SGLD keeps no gradient
  for (int64_t g = 0; g < (apart ? crew : 1); ++g) {
    batches.emplace_back(new Batch(*net, *data, *table, plan->batch, apart ? nullptr : &team));
    batches.back()->own.weight = data->weight * (plan->rows ? plan->scale : 1.0);
    slopes.emplace_back(plan->friction ? 0 : D);
  }
  auto work = [&](int me, int64_t c) {
    WideChain chain(*batches[me], *prior, D, theta + c * D, plan->friction ? momentum + c * D : nullptr,
                    plan->friction ? gradient + c * D : slopes[me].data());
    chain.run(*plan, c, chains, value + c);
  };
  if (apart)
    team.each(chains, work);
  else
    for (int64_t c = 0; c < chains; ++c) work(0, c);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// out[d] for d below `count`, a multiple of 32: the numbers of one stream.
extern "C" int64_t normal_numbers(const Keys* keys, int64_t count, int64_t threads, float* out) {
  Team team(threads);
  const int64_t chunks = count / CHUNK, jobs = (chunks + PIECE - 1) / PIECE;
  team.each(jobs, [&](int, int64_t job) {
    Reals numbers[CHUNK / L];
    for (int64_t c = job * PIECE; c < chunks && c < (job + 1) * PIECE; ++c) {
      normals(*keys, c, numbers);
      for (int v = 0; v < CHUNK / L; ++v) store(out + c * CHUNK + v * L, numbers[v]);
    }
  });
  return 0;
}
