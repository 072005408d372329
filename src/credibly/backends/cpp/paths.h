// Microcanonical Langevin paths of one chain, as inference/kernels/mclmc.py defines their steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "api.h"
#include "chain.h"

namespace {

template <class T> class Path {
 public:
  Path(Chain<T>& chain, const Paths<T>& args, int64_t dim, double weight, int64_t c)
      : chain(chain), args(args), D(dim), weight(weight), theta(args.theta + c * dim),
        direction(args.direction + c * dim), gradient(args.gradient + c * dim),
        noise(args.noise ? args.noise + c * args.noise_pitch : nullptr), c(c) {}

  // Follows the path and adds up the energy errors of its steps and their squares.
  void follow() {
    double prior_before = prior(), value_before = args.log_likelihood[c], sum = 0, squares = 0;
    for (int64_t s = 0; s < args.steps; ++s) {
      double error = kick(args.kick[0]), value = 0;
      for (int64_t k = 0; k < args.drifts; ++k) {
        const T move = T(args.drift[k] * args.step_size);
        if (args.scale)
          for (int64_t d = 0; d < D; ++d) theta[d] += move * (direction[d] * args.scale[d]);
        else
          for (int64_t d = 0; d < D; ++d) theta[d] += move * direction[d];
        value = chain.evaluate(theta, gradient, k + 1 == args.drifts);
        error += kick(args.kick[k + 1]);
      }
      const double prior_after = prior();
      error += weight * (value_before - value) + (prior_after - prior_before);
      // Neither comparison holds for a NaN.
      const double most = std::numeric_limits<double>::max();
      if (!(error <= most && error >= -most)) error = std::numeric_limits<double>::infinity();
      sum += error, squares += error * error;
      value_before = value, prior_before = prior_after;
      if (noise) refresh(noise + s * D);
    }
    args.log_likelihood[c] = value_before;
    args.outcome[2 * c] = sum, args.outcome[2 * c + 1] = squares;
  }

 private:
  // Turns the direction towards the gradient and returns the change of kinetic energy.
  double kick(double fraction) {
    double square = 0, product = 0;
    for (int64_t d = 0; d < D; ++d) {
      const double force = scaled(d);
      square += force * force, product += force * direction[d];
    }
    const double norm = std::max(std::sqrt(square), 1e-300);
    const double cosine = std::min(1.0, std::max(-1.0, product / norm));
    const double delta = fraction * args.step_size * norm / double(D - 1);
    // exp(-delta) times the closed form, which cannot overflow.
    const double decay = std::exp(-delta);
    const T along = T((1 - decay) * (1 + decay + cosine * (1 - decay)) / norm), kept = T(2 * decay);
    double length = 0;
    for (int64_t d = 0; d < D; ++d) {
      direction[d] = T(scaled(d)) * along + kept * direction[d];
      length += double(direction[d]) * direction[d];
    }
    normalise(length);
    return double(D - 1) * (delta - std::log(2.0) + std::log(1 + cosine + (1 - cosine) * decay * decay));
  }

  void refresh(const T* normal) {
    const T strength = T(args.strength);
    double length = 0;
    for (int64_t d = 0; d < D; ++d) {
      direction[d] += strength * normal[d];
      length += double(direction[d]) * direction[d];
    }
    normalise(length);
  }

  void normalise(double square) {
    const T factor = T(1 / std::max(std::sqrt(square), 1e-300));
    for (int64_t d = 0; d < D; ++d) direction[d] *= factor;
  }

  // The gradient in the coordinates theta / scale.
  double scaled(int64_t d) const { return args.scale ? double(gradient[d]) * args.scale[d] : double(gradient[d]); }

  // Tempered negative log density of the prior, up to a constant.
  double prior() const {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) {
      const double gap = double(theta[d]) - args.loc[d];
      sum += args.precision[d] * gap * gap;
    }
    return 0.5 * sum;
  }

  Chain<T>& chain;
  const Paths<T>& args;
  const int64_t D;
  const double weight;
  T *theta, *direction, *gradient;
  const T* noise;
  const int64_t c;
};

template <class T> int64_t paths(const Density<T>& density, const Paths<T>& args) {
  return for_chains<T>(density, args.chains, args.threads, [&](Chain<T>& chain, int64_t c) {
    Path<T>(chain, args, density.network.dim, density.data.weight, c).follow();
  });
}

}  // namespace
