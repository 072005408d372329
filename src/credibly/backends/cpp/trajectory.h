// Trajectories of a symplectic integrator on any density.
#pragma once

#include <cstdint>

#include "api.h"
#include "mass.h"

namespace {

// Moves chain `c` along its trajectory in `dim` dimensions. `evaluate(theta, gradient, value)` writes the gradient of
// the log density; it returns the log likelihood if `value` is set.
template <class T, class Evaluate>
void integrate(const Trajectories<T>& args, int64_t c, int64_t dim, Evaluate evaluate) {
  const int64_t D = dim, steps = args.steps[c], drifts = args.drifts;
  T *theta = args.theta + c * D, *momentum = args.momentum + c * D, *gradient = args.gradient + c * D;
  const T *diagonal = args.inverse_mass.diagonal, size = args.step_size[c];
  const bool correlated = args.inverse_mass.factors > 0;
  Velocity<T> velocity(args.inverse_mass, correlated ? D : 0);
  const double *kick = args.kick, *drift = args.drift;
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t k = 0; k < drifts; ++k) {
      const T push = T(kick[k]) * size, move = T(drift[k]) * size;
      if (k == 0)
        for (int64_t d = 0; d < D; ++d) momentum[d] += push * gradient[d];
      if (correlated) {
        const T* speed = velocity(momentum);
        for (int64_t d = 0; d < D; ++d) theta[d] += move * speed[d];
      } else if (diagonal)
        for (int64_t d = 0; d < D; ++d) theta[d] += move * (momentum[d] * diagonal[d]);
      else
        for (int64_t d = 0; d < D; ++d) theta[d] += move * momentum[d];
      const bool value = s + 1 == steps && k + 1 == drifts;
      const double sum = evaluate(theta, gradient, value);
      if (value) args.log_likelihood[c] = sum;
      const T after = T(kick[k + 1]) * size;
      for (int64_t d = 0; d < D; ++d) momentum[d] += after * gradient[d];
    }
  }
}

}  // namespace
