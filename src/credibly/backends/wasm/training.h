// Training of one or several networks by Adam on all rows, with the steps of backends/cpp/steps.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core.h"
#include "model.h"
#include "random.h"

namespace {

// Writes weights of a new network as torch's nn.Linear draws them: uniform within 1 / sqrt(fan-in).
inline void initialise(const Model& model, uint64_t seed, uint64_t member, float* theta) {
  const Stream stream(seed, INITIAL, {member});
  uint64_t used = 0;
  for (size_t l = 0; l < model.inputs.size(); ++l) {
    const double bound = 1 / std::sqrt(double(model.inputs[l]));
    const int64_t last = model.bias[l] + model.outputs[l];
    for (int64_t d = model.weight[l]; d < last; ++d) theta[d] = float(bound * (2 * stream.uniform(used++) - 1));
  }
  if (model.log_scale >= 0) theta[model.log_scale] = float(model.loc[model.log_scale]);
}

// Minimises -(1/N) log density of every member, with the schedule of `credibly.inference.training`: cosine learning
// rate, Adam with its default decays. With dropout on the inputs of every layer but the first, it minimises the negative
// ELBO of `credibly.methods.dropout`.
class Training {
 public:
  Training(Model& model, int64_t members, int64_t steps, double rate, bool prior, double clip_norm, double dropout,
           uint64_t seed)
      : members(members), steps(steps), theta(members * model.dim), model(model), rate(rate), prior(prior),
        clip_norm(clip_norm), dropout(dropout), seed(seed), first(members * model.dim), second(members * model.dim),
        active(members, 1.0f), parts(2 * members), first_bad(members, std::numeric_limits<double>::infinity()) {
    for (int64_t m = 0; m < members; ++m) initialise(model, seed, m, theta.data() + m * model.dim);
  }

  // Takes up to `count` further steps. Returns whether all is well: memory sufficed and the loss is finite.
  bool advance(int64_t count) {
    count = count < steps - done ? count : steps - done;
    std::vector<double> schedule(4 * count);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t t = done + k;
      double* row = schedule.data() + 4 * k;
      row[0] = rate * 0.5 * (1 + std::cos(M_PI * double(t) / double(steps)));
      row[1] = 1 / (1 - std::pow(BETA1, double(t + 1))), row[2] = 1 / std::sqrt(1 - std::pow(BETA2, double(t + 1)));
      row[3] = double(t);
    }
    const double rows = double(model.rows);
    const Density<float> density = model.density(prior && !dropout ? model.prior_weight() / rows : 0.0);
    TrainingSteps<float> args = {};
    args.members = members, args.threads = 1, args.count = count, args.active = active.data();
    args.theta = theta.data(), args.first_moment = first.data(), args.second_moment = second.data();
    args.loss_parts = parts.data(), args.first_bad = first_bad.data(), args.batch = model.rows;
    args.schedule = schedule.data(), args.schedule_pitch = 4, args.adam = 1;
    args.beta1 = BETA1, args.beta2 = BETA2, args.eps = 1e-8, args.clip_norm = clip_norm;
    args.weight = model.likelihood_weight() / rows;
    Masking masking;
    if (dropout) masking.fill(*this, count, density.data.padded, args);
    if (training_steps_f32(&density, &args)) return false;
    done += count;
    for (double step : first_bad)
      if (std::isfinite(step)) return false;
    return true;
  }

  // Writes parameter vectors under dropout masks, [draw][dim]: a mask of a layer's inputs is one of its weight's columns.
  void passes(int64_t draws, float* out) const {
    const int64_t D = model.dim;
    const float keep = float(1 - dropout);
    for (int64_t s = 0; s < draws; ++s, out += D) {
      std::copy_n(theta.data(), D, out);
      for (size_t l = 1; l < model.inputs.size(); ++l)
        for (int64_t i = 0; i < model.inputs[l]; ++i) {
          const bool kept = Stream(seed, PASS, {uint64_t(s), l}).uniform(i) < keep;
          for (int64_t j = 0; j < model.outputs[l]; ++j)
            out[model.weight[l] + j * model.inputs[l] + i] *= kept ? 1 / keep : 0.0f;
        }
    }
  }

  // The uniform numbers of the masks of a step, [input][padded row].
  static void mask_numbers(uint64_t seed, int64_t step, int64_t layer, int64_t count, float* out) {
    const Stream stream(seed, DROPOUT, {uint64_t(step), uint64_t(layer)});
    for (int64_t k = 0; k < count; ++k) out[k] = float(stream.uniform(k));
  }

  // -(1/N) log density of the members on average, at the last step, up to the prior's constant.
  double loss() const {
    double sum = 0;
    for (float part : parts) sum += part;
    return sum / double(members);
  }

  const int64_t members, steps;
  int64_t done = 0;
  std::vector<float> theta;

 private:
  // Numbers and pointers that steps with dropout need.
  struct Masking {
    void fill(const Training& training, int64_t count, int64_t padded, TrainingSteps<float>& args) {
      const Model& model = training.model;
      const double keep = 1 - training.dropout, weight = model.prior_weight() / double(model.rows);
      for (size_t l = 0; l < model.inputs.size(); ++l) {
        const int64_t size = model.inputs[l] * padded;
        // SIMD loads need aligned addresses.
        uniform.emplace_back(l ? count * size + 16 : 0);
        float* numbers = nullptr;
        if (l) numbers = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(uniform[l].data()) + 63) / 64 * 64);
        for (int64_t k = 0; k < count && l; ++k)
          mask_numbers(training.seed, training.done + k, l, size, numbers + k * size);
        pointers.push_back(numbers);
      }
      for (int64_t m = 0; m < training.members; ++m) {
        for (size_t l = 0; l < model.inputs.size(); ++l) rates.push_back(l ? float(training.dropout) : 0.0f);
        for (int64_t d = 0; d < model.dim; ++d) precision.push_back(float(weight / (model.scale[d] * model.scale[d])));
        float* own = precision.data() + m * model.dim;
        for (size_t l = 1; l < model.inputs.size(); ++l)
          for (int64_t d = model.weight[l]; d < model.bias[l]; ++d) own[d] = float(own[d] / keep);
      }
      args.uniform = pointers.data(), args.rates = rates.data(), args.precision = precision.data();
      args.fixed_from = model.dim;
    }
    std::vector<std::vector<float>> uniform;
    std::vector<const float*> pointers;
    std::vector<float> rates, precision;
  };

  static constexpr double BETA1 = 0.9, BETA2 = 0.999;
  Model& model;
  const double rate;
  const bool prior;
  const double clip_norm, dropout;
  const uint64_t seed;
  std::vector<float> first, second, active, parts;
  std::vector<double> first_bad;
};

}  // namespace
