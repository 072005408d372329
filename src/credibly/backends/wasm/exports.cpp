// What the page's worker calls. Objects are addressed by pointers; arrays lie in the module's memory.

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "hmc.h"
#include "model.h"
#include "plane.h"
#include "predictive.h"
#include "training.h"

#define EXPORT(NAME) extern "C" __attribute__((export_name(#NAME)))

EXPORT(allocate) void* allocate(int32_t bytes) { return std::malloc(bytes); }
EXPORT(release) void release(void* memory) { std::free(memory); }

// -- models ----------------------------------------------------------------------------------------------------------
EXPORT(model_new) Model* model_new(const Settings* settings) { return new Model(*settings); }
EXPORT(model_delete) void model_delete(Model* model) { delete model; }
EXPORT(model_dim) int32_t model_dim(const Model* model) { return int32_t(model->dim); }
EXPORT(model_data) void model_data(Model* model, const float* x, const float* y, int32_t rows) {
  model->set_data(x, y, rows);
}
// Writes log likelihood and log prior to parts[2] and the gradient of the tempered log density.
EXPORT(model_evaluate) int32_t model_evaluate(Model* model, const float* theta, double* parts, float* gradient) {
  const Density<float> density = model->density(model->prior_weight());
  Evaluations<float> args = {1, 1, theta, gradient, parts};
  parts[1] = model->log_prior(theta);
  return int32_t(evaluations_f32(&density, &args));
}

// -- leapfrog trajectories -------------------------------------------------------------------------------------------
// Moves one chain along a leapfrog trajectory, in place; returns the log likelihood at its end.
EXPORT(model_trajectory) double model_trajectory(Model* model, float* theta, float* momentum, double size, int32_t count) {
  static const double KICK[] = {0.5, 0.5}, DRIFT[] = {1.0};
  const Density<float> density = model->density(model->prior_weight());
  std::vector<float> gradient(model->dim);
  double value = 0;
  const float step = float(size);
  const int64_t steps = count;
  Evaluations<float> at_start = {1, 1, theta, gradient.data(), &value};
  Trajectories<float> args = {};
  args.chains = args.threads = args.drifts = 1, args.theta = theta, args.momentum = momentum;
  args.gradient = gradient.data(), args.log_likelihood = &value, args.step_size = &step, args.steps = &steps;
  args.kick = KICK, args.drift = DRIFT;
  if (evaluations_f32(&density, &at_start) || trajectories_f32(&density, &args)) return NAN;
  return value;
}

// -- training --------------------------------------------------------------------------------------------------------
EXPORT(training_new)
Training* training_new(Model* model, int32_t members, int32_t steps, double rate, int32_t prior, double clip_norm,
                       double dropout, double seed) {
  return new Training(*model, members, steps, rate, prior, clip_norm, dropout, uint64_t(seed));
}
EXPORT(training_delete) void training_delete(Training* training) { delete training; }
EXPORT(training_advance) int32_t training_advance(Training* training, int32_t steps) { return training->advance(steps); }
EXPORT(training_theta) float* training_theta(Training* training) { return training->theta.data(); }
// Parameter vectors of the first member under dropout masks, [draw][dim].
EXPORT(training_passes) void training_passes(const Training* training, int32_t draws, float* out) {
  training->passes(draws, out);
}
// The uniform numbers of the masks of a layer in one step.
EXPORT(training_masks) void training_masks(double seed, int32_t step, int32_t layer, int32_t count, float* out) {
  Training::mask_numbers(uint64_t(seed), step, layer, count, out);
}
EXPORT(training_done) int32_t training_done(const Training* training) { return int32_t(training->done); }
EXPORT(training_loss) double training_loss(const Training* training) { return training->loss(); }

// -- HMC -------------------------------------------------------------------------------------------------------------
EXPORT(sampler_new) Sampler* sampler_new(Model* model, const SamplerSettings* settings, const float* start) {
  return new Sampler(*model, *settings, start);
}
EXPORT(sampler_delete) void sampler_delete(Sampler* sampler) { delete sampler; }
EXPORT(sampler_begin) int32_t sampler_begin(Sampler* sampler) { return sampler->begin(); }
EXPORT(sampler_advance) int32_t sampler_advance(Sampler* sampler) { return sampler->advance(); }
EXPORT(sampler_theta) const float* sampler_theta(Sampler* sampler) { return sampler->theta().data(); }
EXPORT(sampler_draws) float* sampler_draws(Sampler* sampler) { return sampler->draws.data(); }
EXPORT(sampler_done) int32_t sampler_done(const Sampler* sampler) { return int32_t(sampler->done); }
EXPORT(sampler_total) int32_t sampler_total(const Sampler* sampler) { return int32_t(sampler->total); }
// Writes acceptance, divergences, step size of the first chain, trajectory length, gradients and restarted chains.
EXPORT(sampler_report) void sampler_report(const Sampler* sampler, double* out) {
  out[0] = sampler->mean_acceptance(), out[1] = double(sampler->divergences), out[2] = sampler->size[0];
  out[3] = sampler->length, out[4] = double(sampler->gradients), out[5] = double(sampler->restarts);
}

// -- predictions -----------------------------------------------------------------------------------------------------
EXPORT(predictive_new) Predictive* predictive_new(const Model* model, const float* x, int32_t rows) {
  return new Predictive(*model, x, rows);
}
EXPORT(predictive_delete) void predictive_delete(Predictive* predictive) { delete predictive; }
EXPORT(predictive_clear) void predictive_clear(Predictive* predictive) { predictive->clear(); }
EXPORT(predictive_add) int32_t predictive_add(Predictive* predictive, const float* theta, int32_t draws) {
  return predictive->add(theta, draws);
}
EXPORT(predictive_draws) int32_t predictive_draws(const Predictive* predictive) { return int32_t(predictive->draws); }
EXPORT(predictive_summary)
int32_t predictive_summary(const Predictive* predictive, double* mean, double* total, double* aleatoric,
                           double* epistemic) {
  return predictive->summary(mean, total, aleatoric, epistemic);
}
EXPORT(predictive_quantile) void predictive_quantile(const Predictive* predictive, double level, double* out) {
  predictive->quantile(level, out);
}
EXPORT(predictive_density)
void predictive_density(const Predictive* predictive, int32_t row, const double* y, int32_t count, double* out) {
  predictive->density(row, y, count, out);
}
EXPORT(predictive_rhat) double predictive_rhat(const Predictive* predictive, int32_t chains) {
  return predictive->rhat(chains);
}
EXPORT(predictive_function) void predictive_function(const Predictive* predictive, int32_t draw, float* out) {
  for (int64_t r = 0; r < predictive->rows; ++r) out[r] = predictive->function(draw, r);
}

// -- convergence -----------------------------------------------------------------------------------------------------
// R-hat and bulk ESS of values [chain][draw], to out[2].
EXPORT(convergence) void convergence(const double* values, int32_t chains, int32_t draws, double* out) {
  const HalfChains halves({values, values + int64_t(chains) * draws}, chains);
  out[0] = halves.rhat(), out[1] = halves.ess();
}

// -- densities of two variables --------------------------------------------------------------------------------------
EXPORT(plane_new) Plane* plane_new(int32_t kind) {
  return new Plane{kind == 0 ? banana : kind == 1 ? funnel : modes, {}};
}
// The plane through points [3][dim] of a model's parameters.
EXPORT(plane_through) Plane* plane_through(Model* model, const float* points) {
  const Slice slice(*model, points);
  return new Plane{slice, slice.corners};
}
EXPORT(plane_delete) void plane_delete(Plane* plane) { delete plane; }
EXPORT(plane_corners) const double* plane_corners(const Plane* plane) { return plane->corners.data(); }
EXPORT(plane_evaluate) double plane_evaluate(const Plane* plane, const double* at, double* gradient) {
  return plane->density(at, gradient);
}
// Log densities on a grid: x inner, y outer. A grid is [from, to, count].
EXPORT(plane_surface) void plane_surface(const Plane* plane, const double* x, const double* y, double* out) {
  const auto at = [](const double* axis, int k) { return axis[0] + (axis[1] - axis[0]) * k / (axis[2] - 1); };
  double gradient[2];
  for (int j = 0; j < int(y[2]); ++j)
    for (int i = 0; i < int(x[2]); ++i) {
      const double point[2] = {at(x, i), at(y, j)};
      *out++ = plane->density(point, gradient);
    }
}
EXPORT(orbit_new)
PlaneSampler* orbit_new(const Plane* plane, int32_t chains, double step, double length, double seed) {
  return new PlaneSampler(plane->density, chains, step, length, uint64_t(seed));
}
EXPORT(orbit_delete) void orbit_delete(PlaneSampler* orbit) { delete orbit; }
EXPORT(orbit_start) void orbit_start(PlaneSampler* orbit, int32_t chain, double u, double v) {
  orbit->start_at(chain, u, v);
}
EXPORT(orbit_advance) void orbit_advance(PlaneSampler* orbit, int32_t chain, int32_t iteration) {
  orbit->advance(chain, iteration);
}
// The same with a given momentum and uniform number.
EXPORT(orbit_advance_from)
void orbit_advance_from(PlaneSampler* orbit, int32_t chain, const double* momentum, double uniform) {
  orbit->advance(chain, momentum, uniform);
}
EXPORT(orbit_points) int32_t orbit_points(const PlaneSampler* orbit) { return int32_t(orbit->error.size()); }
EXPORT(orbit_path) const double* orbit_path(const PlaneSampler* orbit) { return orbit->path.data(); }
EXPORT(orbit_error) const double* orbit_error(const PlaneSampler* orbit) { return orbit->error.data(); }
// Writes acceptance, accepted and divergent of the last trajectory, then of all: mean acceptance, divergences, gradients.
EXPORT(orbit_report) void orbit_report(const PlaneSampler* orbit, double* out) {
  out[0] = orbit->acceptance, out[1] = orbit->accepted, out[2] = orbit->divergent;
  out[3] = orbit->mean_acceptance(), out[4] = double(orbit->divergences), out[5] = double(orbit->gradients);
}
// Writes the larger R-hat and the smaller effective sample size of the two coordinates.
EXPORT(orbit_convergence) void orbit_convergence(const PlaneSampler* orbit, double* out) {
  out[0] = orbit->diagnostic(true), out[1] = orbit->diagnostic(false);
}
