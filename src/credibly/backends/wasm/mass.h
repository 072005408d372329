// A diagonal mass from the draws and gradients of a window of warm-up, as credibly/inference/sampling/mass.py has it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// Running sums of squares of C chains, each about its own mean.
class Welford {
 public:
  Welford(int64_t chains, int64_t dim) : D(dim), mean(chains * dim), squares(chains * dim) {}

  void update(const std::vector<float>& values) {
    ++count;
    for (size_t k = 0; k < mean.size(); ++k) {
      const double gap = values[k] - mean[k];
      mean[k] += gap / double(count);
      squares[k] += gap * (values[k] - mean[k]);
    }
  }
  // The variance of a coordinate, pooled over some chains.
  double variance(int64_t d, const std::vector<int64_t>& chains) const {
    double sum = 0;
    for (int64_t c : chains) sum += squares[c * D + d];
    return sum / double(std::max<int64_t>(1, int64_t(chains.size()) * (count - 1)));
  }

  int64_t count = 0;

 private:
  const int64_t D;
  std::vector<double> mean, squares;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

class MassWindow {
 public:
  MassWindow(int64_t chains, int64_t dim) : D(dim), levels(chains), draws(chains, dim), gradients(chains, dim) {}

  // Takes states and log densities of all chains.
  void update(const std::vector<float>& theta, const std::vector<float>& gradient, const std::vector<double>& log_density) {
    draws.update(theta), gradients.update(gradient);
    for (size_t c = 0; c < levels.size(); ++c) levels[c] += log_density[c];
  }

  // The variances, given the scales of the prior.
  std::vector<float> variances(const std::vector<double>& scale) const {
    const std::vector<int64_t> used = near_chains();
    const double count = double(used.size()) * double(draws.count), weight = count / (count + 5);
    std::vector<float> result(D);
    for (int64_t d = 0; d < D; ++d) {
      const double x = draws.variance(d, used), g = gradients.variance(d, used), guess = scale[d] * scale[d];
      const double otherwise = draws.count > 1 ? weight * x + (1 - weight) * 1e-3 * guess : guess;
      result[d] = float(x > 0 && g > 0 ? std::max(x, std::sqrt(x / g)) : otherwise);
    }
    return result;
  }

 private:
  // Chains whose mean log density is not far below that of the others.
  std::vector<int64_t> near_chains() const {
    std::vector<double> mean = levels, gaps;
    for (double& level : mean) level /= double(draws.count);
    const double usual = median(mean);
    for (double level : mean) gaps.push_back(std::fabs(level - usual));
    const double least = usual - 5 * std::max(1.4826 * median(gaps), std::sqrt(double(D) / 2));
    std::vector<int64_t> near;
    for (size_t c = 0; c < mean.size(); ++c)
      if (mean[c] >= least) near.push_back(int64_t(c));
    return near;
  }

  const int64_t D;
  std::vector<double> levels;
  Welford draws, gradients;
};

// A phase of warm-up: iterations first to end, for the step size alone or for the mass, too.
struct Phase {
  bool mass;
  int64_t first, end;
};

// 15 % for the step size, windows for the mass that double in length, 10 % for the step size with the final mass.
inline std::vector<Phase> windows(int64_t warmup, bool mass) {
  if (!mass || warmup < 20) return {{false, 0, warmup}};
  // As Python rounds: halves to even.
  const int64_t first = int64_t(std::nearbyint(0.15 * double(warmup)));
  const int64_t last = warmup - int64_t(std::nearbyint(0.10 * double(warmup)));
  std::vector<Phase> phases = {{false, 0, first}};
  int64_t start = first, length = std::max<int64_t>(10, int64_t(std::nearbyint(0.05 * double(warmup))));
  while (start < last) {
    const int64_t stop = start + 3 * length <= last ? start + length : last;
    phases.push_back({true, start, stop});
    start = stop, length *= 2;
  }
  phases.push_back({false, last, warmup});
  return phases;
}

}  // namespace
