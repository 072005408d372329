// Log likelihoods of rows and their derivatives by the outputs of a network.
#pragma once

#include "network.h"
#include "vectors.h"

namespace {

// Turns the outputs of a tile into the derivative of its log likelihood; returns the sum of that where `value` asks for it.
template <class T>
double likelihood(const Rows& data, const T* theta, T* f, int64_t first, int64_t rows, bool value, T* gradient) {
  const int64_t count = data.count - first < rows ? data.count - first : rows, K = data.targets;
  const T w = T(data.weight);
  double sum = 0, common = 0;  // the second is the derivative by a log scale that all targets share
  for (int64_t k = 0; k < K && data.kind != CATEGORICAL; ++k) {
    const T* y = static_cast<const T*>(data.y) + k * data.padded + first;
    T* out = f + k * PITCH;
    if (data.kind == GAUSSIAN) {
      const bool learned = data.log_scale >= 0;
      const int64_t place = data.log_scale + (data.per_target ? k : 0);
      const double log_scale = learned ? double(theta[place]) : std::log(data.scale[k]);
      const double precision = std::exp(-2 * log_scale);
      const T factor = w * T(precision);
      double squares[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (value || learned) {
        int64_t r = 0;
        for (; r + 8 <= count; r += 8)
          for (int h = 0; h < 8; ++h) {
            const double gap = double(y[r + h]) - double(out[r + h]);
            squares[h] += gap * gap;
          }
        for (; r < count; ++r) squares[0] += (double(y[r]) - double(out[r])) * (double(y[r]) - double(out[r]));
      }
      for (int64_t r = 0; r < rows; ++r) out[r] = r < count ? (y[r] - out[r]) * factor : T(0);
      double square = 0;
      for (double one : squares) square += one;
      square *= precision;
      sum += -0.5 * square - double(count) * (log_scale + 0.91893853320467274178);
      const double slope = (square - double(count)) * data.weight;
      if (learned && data.per_target) gradient[place] += T(slope);
      if (learned && !data.per_target) common += slope;
    } else if (data.kind == HETEROSCEDASTIC) {
      T* log_variance = f + (K + k) * PITCH;
      constexpr int L = Lanes<T>::N;
      for (int64_t r = 0; r < rows; r += L) {
        const Vec<T> v = *(Vec<T>*)(log_variance + r), gap = *(const Vec<T>*)(y + r) - *(Vec<T>*)(out + r);
        const Vec<T> inverse = exponential(-v), scaled = gap * inverse;
        const Vec<T> square = gap * scaled;
        if (value)
          for (int h = 0; h < L && r + h < count; ++h) sum += -0.5 * (double(square[h]) + double(v[h])) - 0.91893853320467274178;
        *(Vec<T>*)(out + r) = w * scaled;
        *(Vec<T>*)(log_variance + r) = (T(0.5) * w) * (square - T(1));
      }
      for (int64_t r = count; r < rows; ++r) out[r] = log_variance[r] = T(0);
    } else {  // Bernoulli
      constexpr int L = Lanes<T>::N;
      if (value)
        for (int64_t r = 0; r < count; ++r) {
          const double z = out[r];
          sum += double(y[r]) * z - (z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z)));
        }
      for (int64_t r = 0; r < rows; r += L) {
        Vec<T>& z = *(Vec<T>*)(out + r);
        z = w * (*(const Vec<T>*)(y + r) - sigmoid<T>(z));
      }
      for (int64_t r = count; r < rows; ++r) out[r] = T(0);
    }
  }
  if (data.kind == GAUSSIAN && data.log_scale >= 0 && !data.per_target) gradient[data.log_scale] += T(common);
  if (data.kind == CATEGORICAL) {
    constexpr int L = Lanes<T>::N;
    const T* y = static_cast<const T*>(data.y) + first;
    for (int64_t r = 0; r < rows; r += L) {
      Vec<T> top = *(Vec<T>*)(f + r), mass = all(T(0)), chosen = all(T(0));
      const Vec<T> label = *(const Vec<T>*)(y + r);
      for (int64_t k = 1; k < K; ++k) {
        const Vec<T> z = *(Vec<T>*)(f + k * PITCH + r);
        top = z > top ? z : top;
      }
      for (int64_t k = 0; k < K; ++k) {
        Vec<T>& z = *(Vec<T>*)(f + k * PITCH + r);
        const Vec<T> above = z - top;
        chosen = label == T(k) ? above : chosen;
        z = exponential(above);
        mass += z;
      }
      if (value)
        for (int h = 0; h < L && r + h < count; ++h) sum += double(chosen[h]) - std::log(double(mass[h]));
      const Vec<T> share = w / mass;
      for (int64_t k = 0; k < K; ++k) {
        Vec<T>& z = *(Vec<T>*)(f + k * PITCH + r);
        z = (label == T(k) ? all(w) : all(T(0))) - z * share;
      }
    }
    for (int64_t k = 0; k < K; ++k)
      for (int64_t r = count; r < rows; ++r) f[k * PITCH + r] = T(0);
  }
  return sum;
}

}  // namespace
