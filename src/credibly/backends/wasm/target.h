// The density that HMC samples: a model's, or that without its output weights where they can be integrated out.
//
// As in credibly/inference/collapsed.py, the points of a collapsed density are parameter vectors in which standardised
// output weights take the places of the output weights. backends/cpp/collapsed.h evaluates and decodes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core.h"
#include "model.h"
#include "random.h"

namespace {

class Target {
 public:
  explicit Target(Model& model)
      : dim(model.dim), collapsed(collapses(model)), likelihood_weight(collapsed ? 1.0 : model.likelihood_weight()),
        prior_weight(model.prior_weight()), loc(model.loc), scale(model.scale), model(model), std(model.scale) {
    for (int64_t place : places()) {
      output_loc.push_back(loc[place]), output_precision.push_back(prior_weight / (std[place] * std[place]));
      loc[place] = 0, scale[place] = 1, std[place] = std::sqrt(prior_weight);
    }
    for (int64_t d = 0; d < dim; ++d) {
      location.push_back(float(loc[d])), precision.push_back(float(prior_weight / (std[d] * std[d])));
    }
  }
  Target(const Target&) = delete;

  Density<float> density() const {
    const OutputPrior output = {collapsed ? output_loc.data() : nullptr, collapsed ? output_precision.data() : nullptr};
    return {model.network(), model.data(), {location.data(), precision.data()}, output};
  }

  // The normalised log prior of a point.
  double log_prior(const float* theta) const {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double z = (double(theta[d]) - loc[d]) / std[d];
      sum -= 0.5 * (z * z + LOG_TWO_PI) + std::log(std[d]);
    }
    return sum;
  }

  // Replaces the output weights of a parameter vector by standard normal numbers: a draw of them given the others.
  void encode(float* theta, uint64_t seed, uint64_t chain) const {
    std::vector<float> noise(dim);
    Stream(seed, INITIAL, {chain, 2}).normal(noise.data(), dim);
    for (int64_t place : places()) theta[place] = noise[place];
  }

  // Writes the parameter vectors of points.
  bool decode(const float* points, int64_t count, float* theta) const {
    std::copy_n(points, count * dim, theta);
    if (!collapsed) return true;
    const Density<float> density = this->density();
    Decodings<float> args = {count, 1, points, theta};
    return decodings_f32(&density, &args) == 0;
  }

  const int64_t dim;
  const bool collapsed;
  const double likelihood_weight, prior_weight;
  std::vector<double> loc, scale;  // of the prior; the scale of standardised weights is 1

 private:
  static bool collapses(const Model& model) {
    const bool gaussian = model.kind() == GAUSSIAN || model.kind() == HETEROSCEDASTIC;
    return gaussian && model.inputs.size() > 1 && model.inputs.back() < 128;
  }
  // Coordinates of the output weights of the mean.
  std::vector<int64_t> places() const {
    std::vector<int64_t> found;
    for (int64_t j = 0; collapsed && j < model.inputs.back(); ++j) found.push_back(model.weight.back() + j);
    if (collapsed) found.push_back(model.bias.back());
    return found;
  }

  const Model& model;
  std::vector<double> std, output_loc, output_precision;
  std::vector<float> location, precision;
};

}  // namespace
