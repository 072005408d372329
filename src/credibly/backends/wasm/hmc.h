// Hamiltonian Monte Carlo with many chains, as credibly/inference/sampling/hmc.py and warmup.py have it.
//
// Trajectories are those of backends/cpp/chain.h; here are momenta, Metropolis corrections and the adaptation.
// Where output weights are integrated out, the mass is diagonal and adapted; else it is that of the prior.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "adaptation.h"
#include "core.h"
#include "mass.h"
#include "model.h"
#include "random.h"
#include "target.h"

namespace {

// Settings of a sampler, as the page passes them: one double each, in this order.
struct SamplerSettings {
  double chains, draws, warmup, thin;
  double length;  // of a trajectory; 0 takes pi/2 times the prior's scale
  double jitter;  // fraction by which lengths vary
  double refresh; // fraction of the momentum that is resampled
  double target_accept, max_steps, seed;
};

class Sampler {
 public:
  // Starts at theta [chain][dim], whose output weights are resampled where they are integrated out.
  Sampler(Model& model, const SamplerSettings& settings, const float* start)
      : chains(int64_t(settings.chains)), warmup(int64_t(settings.warmup)), thin(int64_t(settings.thin)),
        total(warmup + int64_t(settings.draws) * thin), length(M_PI / 2), target(model),
        phases(windows(warmup, target.collapsed)), settings(settings), D(model.dim), seed(uint64_t(settings.seed)),
        points(start, start + chains * D), momentum(chains * D), gradient(chains * D), log_likelihood(chains),
        log_prior(chains), steps(chains, 1), accepted(chains), rejected(chains),
        dual(settings.target_accept), pool(chains, settings.target_accept) {
    window.emplace(chains, D);
    common_from = phases.size() > 1 ? phases.back().first : warmup / 3;
    const auto ends = std::minmax_element(target.scale.begin(), target.scale.end());
    // Where the prior's scales differ, the mass is 1 / variance and lengths are in units of the scaled coordinates.
    if (target.collapsed || *ends.second > *ends.first * (1 + 1e-6))
      for (double scale : target.scale) inverse_mass.push_back(float(scale * scale));
    else
      length *= *ends.first;
    if (settings.length > 0) length = settings.length;
    for (int64_t c = 0; c < chains; ++c) target.encode(points.data() + c * D, seed, c);
  }
  Sampler(const Sampler&) = delete;

  // Evaluates the starting points and searches for a step size. Returns whether there is one.
  bool begin() {
    density = target.density();
    Evaluations<float> args = {chains, 1, points.data(), gradient.data(), log_likelihood.data()};
    if (evaluations_f32(&density, &args)) return false;
    for (int64_t c = 0; c < chains; ++c) {
      log_prior[c] = target.log_prior(points.data() + c * D);
      if (!std::isfinite(log_likelihood[c] + log_prior[c])) return false;
    }
    return restart(Sizes(chains, length / (10 * std::sqrt(std::sqrt(double(D))))), 10.0);
  }

  // One iteration of all chains. Returns whether it went well.
  bool advance() {
    density = target.density();
    const int64_t t = done;
    const double fraction = t ? settings.refresh : 1.0;
    for (int64_t c = 0; c < chains; ++c) {
      refresh(Stream(seed, MOMENTUM, {uint64_t(c), uint64_t(t)}), fraction, momentum.data() + c * D);
      steps[c] = steps_of(t, size[c], trajectory_length(t));
    }
    const Sizes acceptance =
        transition([&](int64_t c) { return Stream(seed, ACCEPT, {uint64_t(c), uint64_t(t)}).uniform(); });
    if (acceptance.empty()) return false;
    ++done;
    for (int64_t c = 0; c < chains && t >= warmup; ++c) acceptance_sum += acceptance[c] / double(chains);
    if (t < warmup && !adapt(t, acceptance)) return false;
    if (done <= warmup || (done - warmup) % thin) return true;
    draws.resize(draws.size() + chains * D);
    return target.decode(points.data(), chains, draws.data() + draws.size() - chains * D);
  }

  // The parameter vectors at which the chains are.
  const std::vector<float>& theta() {
    current.resize(chains * D);
    target.decode(points.data(), chains, current.data());
    return current;
  }

  double mean_acceptance() const { return done > warmup ? acceptance_sum / double(done - warmup) : last_acceptance; }

  const int64_t chains, warmup, thin, total;
  int64_t done = 0, divergences = 0, gradients = 0, restarts = 0;
  double length;
  std::vector<float> draws;  // [draw][chain][dim]
  Sizes size;                // [chain]

 private:
  // sqrt(1 - fraction) of the old momentum plus N(0, M) for the rest.
  void refresh(const Stream& stream, double fraction, float* out) const {
    std::vector<float> noise(D);
    stream.normal(noise.data(), D);
    const float keep = float(std::sqrt(1 - fraction)), add = float(std::sqrt(fraction));
    for (int64_t d = 0; d < D; ++d) {
      const float fresh = inverse_mass.empty() ? noise[d] : noise[d] / std::sqrt(inverse_mass[d]);
      out[d] = fraction >= 1 ? fresh : keep * out[d] + add * fresh;
    }
  }

  double trajectory_length(int64_t t) const {
    return length * (1 + settings.jitter * (2 * Stream(seed, LENGTH, {uint64_t(t)}).uniform() - 1));
  }
  int64_t steps_of(int64_t t, double size, double length) const {
    // While the mass is a guess, long trajectories cost much and reach little.
    const bool guess = phases.size() > 1 && t < phases[1].end;
    const double most = guess ? std::min(settings.max_steps, 100.0) : settings.max_steps;
    return int64_t(std::min(most, std::max(1.0, std::ceil(length / size - 1e-9))));
  }

  double kinetic(const float* m) const {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += m[d] * m[d] * (inverse_mass.empty() ? 1.0f : inverse_mass[d]);
    return 0.5 * sum;
  }

  // Runs the trajectories and accepts or rejects; uniform(c) is in [0, 1). Returns the acceptance of the chains, empty
  // if memory does not suffice.
  template <class Uniform> Sizes transition(Uniform uniform) {
    std::vector<float> position = points, speed = momentum, slope = gradient, sizes(size.begin(), size.end());
    Sizes value(chains), acceptance(chains);
    static const double KICK[] = {0.5, 0.5}, DRIFT[] = {1.0};
    Trajectories<float> args = {};
    args.chains = chains, args.threads = 1;
    args.theta = position.data(), args.momentum = speed.data(), args.gradient = slope.data();
    args.log_likelihood = value.data(), args.step_size = sizes.data(), args.steps = steps.data();
    args.inverse_mass.diagonal = inverse_mass.empty() ? nullptr : inverse_mass.data();
    args.drifts = 1, args.kick = KICK, args.drift = DRIFT;
    if (trajectories_f32(&density, &args)) return {};
    last_acceptance = 0;
    for (int64_t c = 0; c < chains; ++c) {
      float *from = position.data() + c * D, *to = points.data() + c * D, *m = momentum.data() + c * D;
      const double prior = target.log_prior(from);
      double error = kinetic(speed.data() + c * D) - kinetic(m);
      error += target.likelihood_weight * (log_likelihood[c] - value[c]) + target.prior_weight * (log_prior[c] - prior);
      if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
      acceptance[c] = std::exp(-std::max(error, 0.0)), last_acceptance += acceptance[c] / double(chains);
      gradients += steps[c], accepted[c] = uniform(c) < acceptance[c];
      if (done >= warmup && error > DIVERGENT) ++divergences;
      if (accepted[c]) {
        std::copy_n(from, D, to), std::copy_n(slope.data() + c * D, D, gradient.data() + c * D);
        std::copy_n(speed.data() + c * D, D, m);
        log_likelihood[c] = value[c], log_prior[c] = prior;
      } else {
        for (int64_t d = 0; d < D; ++d) m[d] = -m[d];
      }
    }
    return acceptance;
  }

  bool adapt(int64_t t, const Sizes& acceptance) {
    dual.update(t >= common_from ? Sizes(1, pool.update(acceptance)) : acceptance);
    set_size(dual.size());
    for (int64_t c = 0; c < chains; ++c) rejected[c] = accepted[c] ? 0 : rejected[c] + 1;
    free_stuck_chains(t);
    const bool ends = adapt_mass(t);
    // What every chain accepts is known by now: larger steps would lose the worst of them.
    if (t + 1 == common_from) {
      if (!restart(Sizes(1, harmonic_mean(dual.final())), 1.0)) return false;
    } else if (ends && !restart(dual.final(), 10.0)) {
      return false;
    }
    if (t + 1 == warmup) set_size(Sizes(1, dual.final()[0] * pool.margin()));
    return true;
  }

  // Returns whether a window for the mass ends with iteration t.
  bool adapt_mass(int64_t t) {
    const auto inside = [t](const Phase& phase) { return phase.mass && phase.first <= t && t < phase.end; };
    const auto phase = std::find_if(phases.begin(), phases.end(), inside);
    if (phase == phases.end()) return false;
    Sizes level(chains);
    for (int64_t c = 0; c < chains; ++c)
      level[c] = target.likelihood_weight * log_likelihood[c] + target.prior_weight * log_prior[c];
    window->update(points, gradient, level);
    if (t + 1 < phase->end) return false;
    inverse_mass = window->variances(target.scale);
    window.emplace(chains, D);
    return true;
  }

  // Searches for step sizes near the given ones, of each chain or of all, and starts dual averaging there.
  bool restart(const Sizes& near, double optimism) {
    const State kept = {points, momentum, gradient, log_likelihood, log_prior};
    const int64_t counted = divergences;
    const bool common = near.size() == 1 && chains > 1;
    std::fill(steps.begin(), steps.end(), 1);
    const auto acceptance_of = [&](const Sizes& sizes, int trial) {
      set_size(sizes);
      for (int64_t c = 0; c < chains; ++c)
        refresh(Stream(seed, SEARCH, {uint64_t(c), uint64_t(done), uint64_t(trial)}), 1.0, momentum.data() + c * D);
      const Sizes own = transition([](int64_t) { return 2.0; });
      return common ? Sizes(1, harmonic_mean(own)) : own;
    };
    const Sizes found = search_step_size(acceptance_of, near, settings.target_accept);
    points = kept.points, momentum = kept.momentum, gradient = kept.gradient;
    log_likelihood = kept.log_likelihood, log_prior = kept.log_prior, divergences = counted;
    if (found.empty()) return false;
    dual.restart(found, optimism);
    set_size(dual.size());
    return true;
  }

  void set_size(const Sizes& sizes) { size = sizes.size() == 1 ? Sizes(chains, sizes[0]) : sizes; }

  // Restarts chains that have not moved for a third of the warm-up from the positions of chains that have.
  void free_stuck_chains(int64_t t) {
    const int64_t third = std::max<int64_t>(20, warmup / 3);
    if ((t + 1) % third) return;
    Sizes ordered = size;
    std::nth_element(ordered.begin(), ordered.begin() + (chains - 1) / 2, ordered.end());
    const double negligible = 1e-6 * ordered[(chains - 1) / 2];
    std::vector<int64_t> moving, still;
    for (int64_t c = 0; c < chains; ++c) (rejected[c] >= third || size[c] < negligible ? still : moving).push_back(c);
    if (moving.empty()) return;
    for (int64_t c : still) {
      const double pick = Stream(seed, RESTART, {uint64_t(c), uint64_t(t)}).uniform();
      const int64_t source = moving[size_t(pick * double(moving.size()))];
      std::copy_n(points.data() + source * D, D, points.data() + c * D);
      std::copy_n(gradient.data() + source * D, D, gradient.data() + c * D);
      log_likelihood[c] = log_likelihood[source], log_prior[c] = log_prior[source];
      if (t < common_from) dual.copy(c, source);
      ++restarts;
    }
    set_size(dual.size());
  }

  struct State {
    std::vector<float> points, momentum, gradient;
    Sizes log_likelihood, log_prior;
  };
  static constexpr double DIVERGENT = 1000.0;

  Target target;
  const std::vector<Phase> phases;
  int64_t common_from;  // the iteration from which all chains have one step size
  const SamplerSettings settings;
  const int64_t D;
  const uint64_t seed;
  Density<float> density = {};
  std::vector<float> inverse_mass;  // empty for the identity
  std::vector<float> points;        // [chain][dim]
  std::vector<float> momentum, gradient, current;
  Sizes log_likelihood, log_prior;
  std::vector<int64_t> steps;
  std::vector<int> accepted, rejected;
  std::optional<MassWindow> window;
  DualAveraging dual;
  PooledAcceptance pool;
  double acceptance_sum = 0, last_acceptance = 0;
};

}  // namespace
