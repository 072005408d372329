// The No-U-Turn sampler on one chain: a whole transition, as inference/kernels/nuts.py defines it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "api.h"
#include "chain.h"
#include "mass.h"

namespace {

// A point of phase space with its gradient, its log likelihood and the change of energy since the start.
template <class T> struct Point {
  std::vector<T> theta, momentum, gradient;
  double log_likelihood = 0, error = 0;
};

// Momenta of a run of consecutive points in the order of integration: first, last and sum.
template <class T> struct Segment {
  std::vector<T> first, last, total;
};

template <class T> class Tree {
 public:
  Tree(Chain<T>& chain, const Trees<T>& args, int64_t dim, double weight, int64_t c)
      : chain(chain), args(args), D(dim), weight(weight), c(c), correlated(args.inverse_mass.factors > 0),
        velocity(args.inverse_mass, correlated ? dim : 0) {}

  void grow() {
    const double* uniform = args.uniform + c * args.uniform_pitch;
    Point<T> start = read(), left = start, right = start, chosen = start, candidate, at;
    kinetic_before = kinetic(start.momentum), prior_before = prior(start.theta);
    value_before = start.log_likelihood;
    std::vector<T> total = start.momentum;
    double log_weight = 0, accepted = 0, worst = 0;
    int64_t doublings = 0, steps = 0;
    bool growing = true, moved = false, divergent = false;
    for (int64_t level = 0; level < args.depth && growing; ++level) {
      const bool forward = uniform[2 * level] < 0.5;
      const T size = forward ? args.step_size[c] : -args.step_size[c];
      at = forward ? right : left;
      double half_weight = -std::numeric_limits<double>::infinity();
      std::vector<Segment<T>> halves;
      for (int64_t n = 0; n < int64_t(1) << level && growing; ++n) {
        step(at, size);
        ++steps;
        accepted += std::exp(-std::max(at.error, 0.0)), worst = std::max(worst, at.error);
        if (at.error > args.divergent) {
          divergent = true, growing = false;
          break;
        }
        half_weight = add_logs(half_weight, -at.error);
        if (uniform[2 * args.depth + (int64_t(1) << level) - 1 + n] < std::exp(-at.error - half_weight)) candidate = at;
        Segment<T> segment{at.momentum, at.momentum, at.momentum};
        for (int64_t k = 0; n >> k & 1; ++k) {
          Segment<T>& before = halves.back();
          if (turns(before, segment)) growing = false;
          for (int64_t d = 0; d < D; ++d) segment.total[d] = before.total[d] + segment.total[d];
          segment.first = std::move(before.first);
          halves.pop_back();
        }
        halves.push_back(std::move(segment));
      }
      if (!growing) break;
      if (uniform[2 * level + 1] < std::exp(half_weight - log_weight)) chosen = candidate, moved = true;
      log_weight = add_logs(log_weight, half_weight);
      ++doublings;
      const Segment<T> old{forward ? left.momentum : right.momentum, forward ? right.momentum : left.momentum, total};
      if (turns(old, halves[0])) growing = false;
      for (int64_t d = 0; d < D; ++d) total[d] += halves[0].total[d];
      (forward ? right : left) = at;
    }
    write(chosen);
    double* out = args.outcome + c * 8;
    out[0] = accepted / double(std::max<int64_t>(steps, 1)), out[1] = moved, out[2] = divergent;
    out[3] = chosen.error, out[4] = worst;
    out[5] = double(doublings), out[6] = double(steps), out[7] = growing;
  }

 private:
  Point<T> read() const {
    const T *theta = args.theta + c * D, *momentum = args.momentum + c * D, *gradient = args.gradient + c * D;
    return {{theta, theta + D}, {momentum, momentum + D}, {gradient, gradient + D}, args.log_likelihood[c], 0};
  }
  void write(const Point<T>& point) const {
    std::copy(point.theta.begin(), point.theta.end(), args.theta + c * D);
    std::copy(point.momentum.begin(), point.momentum.end(), args.momentum + c * D);
    std::copy(point.gradient.begin(), point.gradient.end(), args.gradient + c * D);
    args.log_likelihood[c] = point.log_likelihood;
  }

  // One leapfrog step in place.
  void step(Point<T>& point, T size) {
    const T half = T(0.5) * size;
    T *theta = point.theta.data(), *momentum = point.momentum.data(), *gradient = point.gradient.data();
    const T* diagonal = args.inverse_mass.diagonal;
    for (int64_t d = 0; d < D; ++d) momentum[d] += half * gradient[d];
    if (correlated) {
      const T* speed = velocity(momentum);
      for (int64_t d = 0; d < D; ++d) theta[d] += size * speed[d];
    } else if (diagonal)
      for (int64_t d = 0; d < D; ++d) theta[d] += size * (momentum[d] * diagonal[d]);
    else
      for (int64_t d = 0; d < D; ++d) theta[d] += size * momentum[d];
    point.log_likelihood = chain.evaluate(theta, gradient, true);
    for (int64_t d = 0; d < D; ++d) momentum[d] += half * gradient[d];
    const double error = (kinetic(point.momentum) - kinetic_before) + weight * (value_before - point.log_likelihood) +
                         (prior(point.theta) - prior_before);
    // Neither comparison holds for a NaN.
    const double most = std::numeric_limits<double>::max();
    point.error = error <= most && error >= -most ? error : std::numeric_limits<double>::infinity();
  }

  double kinetic(const std::vector<T>& momentum) {
    double sum = 0;
    if (correlated) {
      const T* speed = velocity(momentum.data());
      for (int64_t d = 0; d < D; ++d) sum += momentum[d] * speed[d];
      return 0.5 * sum;
    }
    const T* diagonal = args.inverse_mass.diagonal;
    for (int64_t d = 0; d < D; ++d) sum += momentum[d] * momentum[d] * (diagonal ? diagonal[d] : T(1));
    return 0.5 * sum;
  }
  // Tempered negative log density of the prior, up to a constant.
  double prior(const std::vector<T>& theta) const {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) {
      const double gap = double(theta[d]) - args.loc[d];
      sum += args.precision[d] * gap * gap;
    }
    return 0.5 * sum;
  }

  bool turns(const Segment<T>& a, const Segment<T>& b) {
    if (correlated)
      return turns(a.first, b.last, a.total, b.total) || turns(a.first, b.first, a.total, b.first) ||
             turns(a.last, b.last, a.last, b.total);
    const T* diagonal = args.inverse_mass.diagonal;
    double sums[6] = {0, 0, 0, 0, 0, 0};
    for (int64_t d = 0; d < D; ++d) {
      const T mass = diagonal ? diagonal[d] : T(1);
      const T whole = (a.total[d] + b.total[d]) * mass, front = (a.total[d] + b.first[d]) * mass;
      const T back = (a.last[d] + b.total[d]) * mass;
      sums[0] += a.first[d] * whole, sums[1] += b.last[d] * whole;
      sums[2] += a.first[d] * front, sums[3] += b.first[d] * front;
      sums[4] += a.last[d] * back, sums[5] += b.last[d] * back;
    }
    for (double sum : sums)
      if (sum <= 0) return true;
    return false;
  }

  // Whether a run turns whose momenta sum to one + two.
  bool turns(const std::vector<T>& first, const std::vector<T>& last, const std::vector<T>& one,
             const std::vector<T>& two) {
    sum.resize(D);
    for (int64_t d = 0; d < D; ++d) sum[d] = one[d] + two[d];
    const T* speed = velocity(sum.data());
    double at_first = 0, at_last = 0;
    for (int64_t d = 0; d < D; ++d) at_first += first[d] * speed[d], at_last += last[d] * speed[d];
    return at_first <= 0 || at_last <= 0;
  }

  // log(exp(a) + exp(b)); b is finite.
  static double add_logs(double a, double b) {
    const double high = std::max(a, b), low = std::min(a, b);
    return high + std::log1p(std::exp(low - high));
  }

  Chain<T>& chain;
  const Trees<T>& args;
  const int64_t D;
  const double weight;
  const int64_t c;
  const bool correlated;
  Velocity<T> velocity;
  std::vector<T> sum;
  double kinetic_before = 0, prior_before = 0, value_before = 0;
};

template <class T> int64_t trees(const Density<T>& density, const Trees<T>& args) {
  return for_chains<T>(density, args.chains, args.threads, [&](Chain<T>& chain, int64_t c) {
    // The density without output weights is tempered as a whole.
    const double weight = density.output.precision ? 1.0 : density.data.weight;
    Tree<T>(chain, args, density.network.dim, weight, c).grow();
  });
}

}  // namespace
