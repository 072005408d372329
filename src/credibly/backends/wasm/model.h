// A multilayer perceptron with its likelihood, prior and data, as the structs of backends/cpp/api.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../cpp/api.h"
#include "../cpp/layout.h"

namespace {

constexpr double LOG_TWO_PI = 1.8378770664093454836;

// Settings of a model, as the page passes them: one double each, in this order.
struct Settings {
  double inputs, depth, hidden[3], outputs;  // depth: hidden layers
  double activation;  // an Activation
  double likelihood;  // a Likelihood
  double noise;       // standard deviation of Gaussian noise, or the floor of heteroscedastic noise
  double learned;     // whether the log of the noise is a parameter
  double prior_scale;
  double fan_in;  // whether the prior's scale is divided by the square root of the fan-in
  double likelihood_temperature, prior_temperature;
};

// Columns [column][padded row], aligned for SIMD loads.
class Columns {
 public:
  void assign(const float* rows, int64_t count, int64_t width) {
    padded = std::max<int64_t>(1, (count + ROW_MULTIPLE - 1) / ROW_MULTIPLE) * ROW_MULTIPLE;
    memory.assign(width * padded + 16, 0.0f);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t k = 0; k < width; ++k) data()[k * padded + r] = rows[r * width + k];
  }
  float* data() { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64); }
  const float* data() const { return const_cast<Columns*>(this)->data(); }

  int64_t padded = 0;

 private:
  std::vector<float> memory;
};

class Model {
 public:
  explicit Model(const Settings& settings) : settings(settings) {
    const int64_t depth = int64_t(settings.depth), K = int64_t(settings.outputs);
    int64_t offset = 0;
    for (int64_t l = 0; l <= depth; ++l) {
      inputs.push_back(l ? outputs[l - 1] : int64_t(settings.inputs));
      outputs.push_back(l < depth ? int64_t(settings.hidden[l]) : K);
      weight.push_back(offset), bias.push_back(offset + inputs[l] * outputs[l]);
      offset += (inputs[l] + 1) * outputs[l];
      activation.push_back(l < depth ? int64_t(settings.activation) : NONE);
      // As in `networks.layout`, a bias has a fan-in of 1.
      const double shrink = settings.fan_in ? 1 / std::sqrt(double(inputs[l])) : 1.0;
      scale.resize(bias[l], settings.prior_scale * shrink);
      scale.resize(offset, settings.prior_scale);
    }
    loc.assign(offset, 0.0);
    log_scale = settings.learned ? offset++ : -1;
    if (settings.learned) loc.push_back(-1.0), scale.push_back(1.0);
    dim = offset;
  }
  Model(const Model&) = delete;

  // Rows x [row][input] and y [row]; labels are class numbers.
  void set_data(const float* x, const float* y, int64_t count) {
    rows = count;
    this->x.assign(x, count, inputs[0]);
    this->y.assign(y, count, 1);
    if (log_scale >= 0) loc[log_scale] = centre_of_log_scale(y, count);
  }

  Network network() const {
    return {int64_t(inputs.size()), inputs.data(), outputs.data(), weight.data(), bias.data(), activation.data(), dim};
  }

  int64_t kind() const { return int64_t(settings.likelihood); }
  double likelihood_weight() const { return 1 / settings.likelihood_temperature; }
  double prior_weight() const { return 1 / settings.prior_temperature; }

  Data<float> data() const {
    const int64_t targets = kind() == CATEGORICAL ? int64_t(settings.outputs) : 1;
    return {rows, x.padded, x.data(), y.data(), kind(), targets, &settings.noise, log_scale, 0, likelihood_weight(),
            nullptr};
  }

  // The log density with the given weight of the log prior, valid until the next call.
  Density<float> density(double prior_weight) {
    location.assign(loc.begin(), loc.end());
    precision.resize(dim);
    for (int64_t d = 0; d < dim; ++d) precision[d] = float(prior_weight / (scale[d] * scale[d]));
    return {network(), data(), {location.data(), precision.data()}, {nullptr, nullptr}};
  }

  // The normalised log prior.
  double log_prior(const float* theta) const {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double z = (double(theta[d]) - loc[d]) / scale[d];
      sum -= 0.5 * (z * z + LOG_TWO_PI) + std::log(scale[d]);
    }
    return sum;
  }

  const Settings settings;
  std::vector<int64_t> inputs, outputs, weight, bias, activation;
  std::vector<double> loc, scale;  // of the prior, [dim]
  int64_t log_scale, dim, rows = 0;

 private:
  // As `likelihoods.Gaussian` has it: noise of about a third of the standard deviation of y.
  static double centre_of_log_scale(const float* y, int64_t count) {
    double mean = 0, square = 0;
    for (int64_t r = 0; r < count; ++r) mean += y[r] / double(count);
    for (int64_t r = 0; r < count; ++r) square += (y[r] - mean) * (y[r] - mean) / double(count);
    const auto ends = std::minmax_element(y, y + count);
    const bool varies = count && *ends.second > *ends.first;
    return -1.0 + (varies ? std::round(0.5 * std::log(square) * 100) / 100 : 0.0);
  }

  Columns x, y;
  std::vector<float> location, precision;
};

}  // namespace
