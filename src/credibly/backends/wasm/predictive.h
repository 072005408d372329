// The Bayesian model average on a grid: credibly/predictive for the likelihoods of the playground.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "convergence.h"
#include "core.h"
#include "model.h"

namespace {

class Predictive {
 public:
  // Inputs x [row][input].
  Predictive(const Model& model, const float* x, int64_t rows)
      : rows(rows), model(model), K(model.outputs.back()), classes(model.kind() == BERNOULLI) {
    this->x.assign(x, rows, model.inputs[0]);
  }

  // Adds the outputs of parameter vectors theta [draw][dim]. Returns whether memory sufficed.
  bool add(const float* theta, int64_t count) {
    values.resize((draws + count) * rows * K);
    Outputs<float> args = {model.network(), rows, x.padded, x.data(), count, 1, theta, values.data() + draws * rows * K};
    if (outputs_f32(&args)) return false;
    for (int64_t s = 0; s < count && model.log_scale >= 0; ++s)
      learned.push_back(std::exp(2.0 * theta[s * model.dim + model.log_scale]));
    draws += count;
    return true;
  }
  void clear() { draws = 0, values.clear(), learned.clear(); }

  // Writes the mean of each row and its uncertainty, total and in parts: variances, or entropies in nats for classes.
  bool summary(double* mean, double* total, double* aleatoric, double* epistemic) const {
    std::vector<double> means(rows * K), variances(rows * K);
    Moments<float> args = {values.data(), draws, rows * K, 1, means.data(), variances.data()};
    if (!classes && moments_f32(&args)) return false;
    for (int64_t r = 0; r < rows; ++r) {
      double noise = 0, probability = 0;
      for (int64_t s = 0; s < draws; ++s) {
        const double p = classes ? sigmoid(output(s, r)) : 0.0;
        noise += classes ? entropy(p) : variance(s, r);
        probability += p;
      }
      aleatoric[r] = noise / double(draws);
      mean[r] = classes ? probability / double(draws) : means[r * K];
      epistemic[r] = classes ? std::max(0.0, entropy(mean[r]) - aleatoric[r]) : variances[r * K];
      if (draws == 1) epistemic[r] = 0;
      total[r] = classes ? entropy(mean[r]) : aleatoric[r] + epistemic[r];
    }
    return true;
  }

  // Writes a quantile of the mixture of Gaussians at each row.
  void quantile(double level, double* out) const {
    const double z = normal_quantile(level);
    for (int64_t r = 0; r < rows; ++r) {
      // It lies between the smallest and the largest quantile of the components.
      double low = HUGE_VAL, high = -HUGE_VAL;
      for (int64_t s = 0; s < draws; ++s) {
        const double end = output(s, r) + z * std::sqrt(variance(s, r));
        low = std::min(low, end), high = std::max(high, end);
      }
      double at = 0.5 * (low + high);
      for (int k = 0; k < 60 && high - low > 1e-9 * (1 + std::fabs(at)); ++k) {
        double excess = -level, slope = 0;
        for (int64_t s = 0; s < draws; ++s) {
          const double scale = std::sqrt(variance(s, r)), u = (at - output(s, r)) / scale;
          excess += 0.5 * std::erfc(-u * M_SQRT1_2) / double(draws), slope += normal(u) / scale / double(draws);
        }
        (excess > 0 ? high : low) = at;
        const double newton = at - excess / slope;
        const bool inside = newton > low && newton < high;
        if (inside && std::fabs(newton - at) <= 1e-10 * (1 + std::fabs(at))) break;
        at = inside ? newton : 0.5 * (low + high);
      }
      out[r] = at;
    }
  }

  // Writes the predictive density at `count` values y, at row r.
  void density(int64_t r, const double* y, int64_t count, double* out) const {
    for (int64_t k = 0; k < count; ++k) {
      out[k] = 0;
      for (int64_t s = 0; s < draws; ++s) {
        const double scale = std::sqrt(variance(s, r));
        out[k] += normal((y[k] - output(s, r)) / scale) / scale / double(draws);
      }
    }
  }

  // The largest R-hat over the rows, of draws [draw][chain]; NaN with fewer than 4 draws per chain. Rows at which no
  // draw differs are left out.
  double rhat(int64_t chains) const {
    const int64_t each = draws / chains;
    double largest = NAN;
    std::vector<double> column(chains * each);
    for (int64_t r = 0; r < rows && each >= 4; ++r) {
      for (int64_t c = 0; c < chains; ++c)
        for (int64_t s = 0; s < each; ++s) column[c * each + s] = function(s * chains + c, r);
      largest = std::fmax(largest, HalfChains(column, chains).rhat());
    }
    return largest;
  }

  // The function of a draw: mean of y, or probability of label 1.
  float function(int64_t s, int64_t r) const { return float(classes ? sigmoid(output(s, r)) : output(s, r)); }

  const int64_t rows;
  int64_t draws = 0;

 private:
  double output(int64_t s, int64_t r) const { return values[(s * rows + r) * K]; }
  // Of the noise of draw s at row r.
  double variance(int64_t s, int64_t r) const {
    const double noise = model.settings.noise;
    if (!learned.empty()) return learned[s];
    return noise * noise + (K == 2 ? std::exp(double(values[(s * rows + r) * K + 1])) : 0.0);
  }
  static double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
  static double normal(double u) { return std::exp(-0.5 * u * u) / std::sqrt(2 * M_PI); }
  static double entropy(double p) {
    const double q = 1 - p;
    return (p > 0 ? -p * std::log(p) : 0) + (q > 0 ? -q * std::log(q) : 0);
  }

  const Model& model;
  const int64_t K;
  const bool classes;
  Columns x;
  std::vector<float> values;    // [draw][row][output]
  std::vector<double> learned;  // [draw], variance of a learned noise
};

}  // namespace
