// HMC on densities of two variables, with every leapfrog step recorded: the integrator of backends/cpp/trajectory.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "../cpp/trajectory.h"
#include "convergence.h"
#include "core.h"
#include "model.h"
#include "random.h"

namespace {

// Returns the log density at (u, v) and writes its gradient.
using PlaneDensity = std::function<double(const double* at, double* gradient)>;

inline double banana(const double* at, double* gradient) {
  const double u = at[0], bend = at[1] - 0.5 * u * u + 1;
  gradient[0] = -u + 4 * u * bend, gradient[1] = -4 * bend;
  return -0.5 * u * u - 2 * bend * bend;
}

inline double funnel(const double* at, double* gradient) {
  const double u = at[0], v = at[1], precision = std::exp(-v), variance = 1.5 * 1.5;
  gradient[0] = -u * precision, gradient[1] = -v / variance + 0.5 * u * u * precision - 0.5;
  return -0.5 * v * v / variance - 0.5 * u * u * precision - 0.5 * v;
}

inline double modes(const double* at, double* gradient) {
  const double precision = 1 / (0.6 * 0.6);
  const auto part = [&](double centre) {
    return -0.5 * precision * ((at[0] - centre) * (at[0] - centre) + at[1] * at[1]);
  };
  const double left = part(-2), right = part(2), high = std::fmax(left, right);
  const double sum = std::exp(left - high) + std::exp(right - high), share = std::exp(right - high) / sum;
  gradient[0] = -precision * (at[0] - (4 * share - 2)), gradient[1] = -precision * at[1];
  return high + std::log(0.5 * sum);
}

// The log density of a model on the plane through three parameter vectors: the first is the origin, the second lies on
// the first axis. Coordinates are Euclidean distances.
class Slice {
 public:
  Slice(Model& model, const float* points)
      : model(model), origin(points, points + model.dim), theta(model.dim), gradient(model.dim) {
    const int64_t D = model.dim;
    for (int k = 0; k < 2; ++k) {
      axes[k].resize(D);
      for (int64_t d = 0; d < D; ++d) axes[k][d] = double(points[(k + 1) * D + d]) - points[d];
    }
    const double length = scale_to_one(axes[0]), along = dot(axes[0], axes[1]);
    for (int64_t d = 0; d < D; ++d) axes[1][d] -= along * axes[0][d];
    corners = {0, 0, length, 0, along, scale_to_one(axes[1])};
  }

  double operator()(const double* at, double* slope) {
    const int64_t D = model.dim;
    for (int64_t d = 0; d < D; ++d) theta[d] = float(origin[d] + at[0] * axes[0][d] + at[1] * axes[1][d]);
    const Density<float> density = model.density(model.prior_weight());
    double value = 0;
    Evaluations<float> args = {1, 1, theta.data(), gradient.data(), &value};
    if (evaluations_f32(&density, &args)) return NAN;
    for (int k = 0; k < 2; ++k) {
      slope[k] = 0;
      for (int64_t d = 0; d < D; ++d) slope[k] += double(gradient[d]) * axes[k][d];
    }
    return model.likelihood_weight() * value + model.prior_weight() * model.log_prior(theta.data());
  }

  std::vector<double> corners;  // of the three points on the plane, [point][2]

 private:
  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  }
  // Returns the length before.
  static double scale_to_one(std::vector<double>& axis) {
    const double length = std::sqrt(dot(axis, axis));
    for (double& value : axis) value /= length;
    return length;
  }
  Model& model;
  std::vector<float> origin, theta, gradient;
  std::vector<double> axes[2];
};

// A density as the page holds it.
struct Plane {
  PlaneDensity density;
  std::vector<double> corners;
};

// Chains of HMC with a given step size and N(0, I) momenta.
class PlaneSampler {
 public:
  PlaneSampler(PlaneDensity density, int64_t chains, double step, double length, uint64_t seed)
      : chains(chains), density(density), step(step), steps(int64_t(std::ceil(length / step - 1e-9))), seed(seed),
        position(2 * chains) {
    if (steps < 1) steps = 1;
    for (int64_t c = 0; c < chains; ++c) start_at(c, 0.0, 0.0);
  }

  void start_at(int64_t c, double u, double v) { position[2 * c] = u, position[2 * c + 1] = v; }

  // Moves chain c by one trajectory from the given momentum and records it; uniform is in [0, 1).
  void advance(int64_t c, const double* momentum, double uniform) {
    static const double KICK[] = {0.5, 0.5}, DRIFT[] = {1.0};
    double at[2] = {position[2 * c], position[2 * c + 1]}, m[2] = {momentum[0], momentum[1]}, gradient[2], value = 0;
    const double before = density(at, gradient) - kinetic(m);
    const int64_t one = 1;
    Trajectories<double> args = {};
    args.chains = args.threads = 1, args.theta = at, args.momentum = m, args.gradient = gradient;
    args.log_likelihood = &value, args.step_size = &step, args.steps = &one;
    args.drifts = 1, args.kick = KICK, args.drift = DRIFT;
    path.assign({at[0], at[1]}), error.assign(1, 0.0);
    for (int64_t k = 0; k < steps; ++k) {
      integrate<double>(args, 0, 2, [this](const double* at, double* gradient, bool) { return density(at, gradient); });
      ++gradients;
      error.push_back(before - (value - kinetic(m)));
      path.push_back(at[0]), path.push_back(at[1]);
      // Neither comparison holds for a NaN.
      if (!(std::fabs(at[0]) < FAR && std::fabs(at[1]) < FAR)) break;
    }
    double last = error.back();
    if (!std::isfinite(last) || int64_t(error.size()) <= steps) last = std::numeric_limits<double>::infinity();
    acceptance = std::exp(-std::fmax(last, 0.0)), accepted = uniform < acceptance, divergent = last > DIVERGENT;
    acceptance_sum += acceptance, divergences += divergent;
    if (accepted) start_at(c, at[0], at[1]);
    draws.push_back(position[2 * c]), draws.push_back(position[2 * c + 1]);
  }

  // The same with random numbers of iteration t.
  void advance(int64_t c, int64_t t) {
    float noise[2];
    Stream(seed, MOMENTUM, {uint64_t(c), uint64_t(t)}).normal(noise, 2);
    const double momentum[2] = {noise[0], noise[1]};
    advance(c, momentum, Stream(seed, ACCEPT, {uint64_t(c), uint64_t(t)}).uniform());
  }

  // The larger R-hat or the smaller effective sample size of the two coordinates; chains advance in turn.
  double diagnostic(bool rhat) const {
    const int64_t each = int64_t(draws.size()) / 2 / chains;
    double worst = NAN;
    for (int k = 0; k < 2 && each >= 4; ++k) {
      std::vector<double> column(chains * each);
      for (int64_t c = 0; c < chains; ++c)
        for (int64_t s = 0; s < each; ++s) column[c * each + s] = draws[2 * (s * chains + c) + k];
      const HalfChains halves(column, chains);
      worst = rhat ? std::fmax(worst, halves.rhat()) : std::fmin(worst, halves.ess());
    }
    return worst;
  }

  // Over all trajectories.
  double mean_acceptance() const { return acceptance_sum / (0.5 * double(draws.size())); }

  const int64_t chains;
  std::vector<double> path, error;  // of the last trajectory: [point][2] and [point], with the start
  double acceptance = 0, acceptance_sum = 0;
  bool accepted = false, divergent = false;
  int64_t gradients = 0, divergences = 0;

 private:
  static double kinetic(const double* m) { return 0.5 * (m[0] * m[0] + m[1] * m[1]); }
  static constexpr double FAR = 1e6, DIVERGENT = 1000.0;
  PlaneDensity density;
  const double step;
  int64_t steps;
  const uint64_t seed;
  std::vector<double> position, draws;
};

}  // namespace
