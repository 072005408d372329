// R-hat and effective sample size of one coordinate, as credibly/diagnostics/convergence.py defines them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace {

// The standard normal quantile: a bracket halved until it is narrow, then Newton steps.
inline double normal_quantile(double p) {
  double low = -9, high = 9;
  const auto excess = [p](double z) { return 0.5 * std::erfc(-z * M_SQRT1_2) - p; };
  for (int k = 0; k < 8; ++k) (excess(0.5 * (low + high)) > 0 ? high : low) = 0.5 * (low + high);
  double z = 0.5 * (low + high);
  for (int k = 0; k < 8; ++k) z -= excess(z) / (std::exp(-0.5 * z * z) / std::sqrt(2 * M_PI));
  return z;
}

// Normal scores of the ranks 1, 1.5, 2, ... among `size` values: mean ranks are integers or halves of them. Coordinates
// share the table of the last size.
inline const std::vector<double>& score_table(int64_t size) {
  static std::vector<double> table;
  if (int64_t(table.size()) == 2 * size - 1) return table;
  table.clear();
  for (int64_t k = 2; k <= 2 * size; ++k)
    table.push_back(normal_quantile((0.5 * double(k) - 0.375) / (double(size) + 0.25)));
  return table;
}

// Half-chains of one coordinate [half-chain][draw]; of an odd number of draws the middle one is dropped.
class HalfChains {
 public:
  // Values [chain][draw].
  HalfChains(const std::vector<double>& values, int64_t chains)
      : n(int64_t(values.size()) / chains / 2), table(score_table(2 * chains * n)) {
    const int64_t draws = int64_t(values.size()) / chains;
    for (int64_t first : {int64_t(0), draws - n})
      for (int64_t c = 0; c < chains; ++c)
        split.insert(split.end(), values.begin() + c * draws + first, values.begin() + c * draws + first + n);
  }

  double rhat() const {
    std::vector<double> ordered = split;
    std::sort(ordered.begin(), ordered.end());
    const size_t middle = ordered.size() / 2;
    const double median = 0.5 * (ordered[middle - 1] + ordered[middle]);
    std::vector<double> folded = split;
    for (double& value : folded) value = std::fabs(value - median);
    return std::fmax(plain_rhat(scores(split)), plain_rhat(scores(folded)));
  }

  // Bulk effective sample size.
  double ess() const {
    const std::vector<double> y = scores(split);
    const int64_t m = int64_t(y.size()) / n;
    const double S = double(y.size());
    std::vector<double> autocovariance(n, 0.0), means = means_of(y);
    for (int64_t c = 0; c < m; ++c)
      for (int64_t lag = 0; lag < n; ++lag)
        for (int64_t t = 0; t + lag < n; ++t)
          autocovariance[lag] += (y[c * n + t] - means[c]) * (y[c * n + t + lag] - means[c]) / S;
    const auto ends = std::minmax_element(y.begin(), y.end());
    if (*ends.second - *ends.first < 1e-15) return S;
    const double total = autocovariance[0] + variance(means);
    const auto rho = [&](int64_t t) {
      return t ? 1 - (autocovariance[0] * double(n) / double(n - 1) - autocovariance[t]) / total : 1.0;
    };
    // Geyer's initial monotone sequence.
    const int64_t last = std::max<int64_t>(0, (n - 3) / 2);
    double area = 0, least = std::numeric_limits<double>::infinity();
    int64_t stop = 0;
    for (; stop < last; ++stop) {
      const double pair = rho(2 * stop) + rho(2 * stop + 1);
      if (!(pair > 0)) break;
      least = std::min(least, pair), area += least;
    }
    double even = rho(2 * stop);
    if (even + rho(2 * stop + 1) < 0 && even <= 0) even = 0;
    return S / std::max(2 * area - 1 + even, 1 / std::log10(S));
  }

 private:
  // Normal scores of the ranks; ties share their mean rank.
  std::vector<double> scores(const std::vector<double>& values) const {
    const int64_t size = int64_t(values.size());
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), int64_t(0));
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] < values[b]; });
    std::vector<double> result(size);
    for (int64_t first = 0, end; first < size; first = end) {
      for (end = first + 1; end < size && values[order[end]] == values[order[first]];) ++end;
      for (int64_t k = first; k < end; ++k) result[order[k]] = table[first + end - 1];
    }
    return result;
  }

  std::vector<double> means_of(const std::vector<double>& z) const {
    std::vector<double> means;
    for (size_t first = 0; first < z.size(); first += n)
      means.push_back(std::accumulate(z.begin() + first, z.begin() + first + n, 0.0) / double(n));
    return means;
  }
  static double variance(const std::vector<double>& values) {
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
    double sum = 0;
    for (double value : values) sum += (value - mean) * (value - mean);
    return sum / double(values.size() - 1);
  }
  double plain_rhat(const std::vector<double>& z) const {
    const std::vector<double> means = means_of(z);
    double within = 0;
    for (size_t k = 0; k < z.size(); ++k) within += (z[k] - means[k / n]) * (z[k] - means[k / n]);
    within /= double(means.size()) * double(n - 1);
    // Scores that differ at all give more than 6/S^3; less is rounding error in the mean of equal ones.
    if (within < 1e-28) within = 0;
    return std::sqrt(double(n - 1) / double(n) + variance(means) / within);
  }

  const int64_t n;
  const std::vector<double>& table;
  std::vector<double> split;
};

}  // namespace
