// Adaptation of step sizes in warm-up, as credibly/inference/adaptation.py defines it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using Sizes = std::vector<double>;

// Dual averaging towards a target acceptance (Hoffman & Gelman 2014, section 3.2), for one or several step sizes.
class DualAveraging {
 public:
  explicit DualAveraging(double target) : target(target) {}

  void restart(const Sizes& size, double optimism) {
    const size_t n = size.size();
    centre.resize(n), log_size.resize(n), bias.assign(n, 0.0);
    for (size_t k = 0; k < n; ++k) centre[k] = std::log(optimism * size[k]), log_size[k] = std::log(size[k]);
    log_mean = log_size;
    count = 0;
  }

  void update(const Sizes& acceptance) {
    ++count;
    const double share = 1 / (double(count) + DELAY), weight = std::pow(double(count), -KAPPA);
    for (size_t k = 0; k < bias.size(); ++k) {
      bias[k] = (1 - share) * bias[k] + share * (target - acceptance[k]);
      log_size[k] = centre[k] - std::sqrt(double(count)) / GAMMA * bias[k];
      log_mean[k] = weight * log_size[k] + (1 - weight) * log_mean[k];
    }
  }

  // The step sizes to try next, and their averages.
  Sizes size() const { return exponentials(log_size); }
  Sizes final() const { return exponentials(log_mean); }

  // Copies what is known about chain `source` to chain `chain`.
  void copy(size_t chain, size_t source) {
    for (Sizes* part : {&centre, &log_size, &log_mean, &bias}) (*part)[chain] = (*part)[source];
  }

 private:
  static Sizes exponentials(Sizes values) {
    for (double& value : values) value = std::exp(value);
    return values;
  }
  static constexpr double GAMMA = 0.05, DELAY = 10.0, KAPPA = 0.75;
  const double target;
  int64_t count = 0;
  Sizes centre, log_size, log_mean, bias;
};

// One acceptance of all chains, in which a chain that does not move cannot hide.
class PooledAcceptance {
 public:
  PooledAcceptance(int64_t chains, double target) : least(target / 2), recent(chains, target) {}

  double update(const Sizes& acceptance) {
    double mean = 0;
    for (size_t c = 0; c < recent.size(); ++c) {
      recent[c] += (acceptance[c] - recent[c]) / MEMORY;
      mean += acceptance[c] / double(recent.size());
    }
    const double worst = *std::min_element(recent.begin(), recent.end());
    limited += ((worst < least ? 1.0 : 0.0) - limited) / MEMORY;
    return mean * std::min(worst / least, 1.0);
  }

  // Factor of the final step size: 1 unless one chain limits it.
  double margin() const { return limited > 0.1 ? 0.75 : 1.0; }

 private:
  static constexpr double MEMORY = 10;
  const double least;
  Sizes recent;
  double limited = 0;
};

inline double harmonic_mean(const Sizes& values) {
  double sum = 0;
  for (double value : values) sum += 1 / std::max(value, 1e-300);
  return double(values.size()) / sum;
}

// Doubles or halves step sizes until a single step is accepted about as often as the target. `acceptance_of(sizes,
// trial)` returns the acceptance of one step. A chain without a size gets the smallest (or largest) of the others; the
// result is empty if no chain has one.
template <class Acceptance> Sizes search_step_size(Acceptance acceptance_of, Sizes size, double target) {
  constexpr double SMALLEST = 1e-12, LARGEST = 1e12;
  const size_t n = size.size();
  std::vector<int> direction(n, 0), found(n, 0);
  for (int trial = 0; trial < 200 && std::count(found.begin(), found.end(), 0); ++trial) {
    const Sizes acceptance = acceptance_of(size, trial);
    for (size_t k = 0; k < n; ++k) {
      if (found[k]) continue;
      const int wanted = acceptance[k] > target ? 1 : -1;
      if (direction[k] && wanted != direction[k]) {
        if (wanted < 0) size[k] /= 2;
        found[k] = 1;
      } else {
        size[k] *= wanted > 0 ? 2.0 : 0.5;
        direction[k] = wanted;
      }
      if (size[k] < SMALLEST || size[k] > LARGEST) found[k] = 1;
    }
  }
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (double value : size)
    if (value >= SMALLEST && value <= LARGEST) low = std::min(low, value), high = std::max(high, value);
  if (high == 0) return {};
  for (double& value : size) value = value < SMALLEST ? low : value > LARGEST ? high : value;
  return size;
}

}  // namespace
