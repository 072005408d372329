// Products with an inverse mass that has correlations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "api.h"

namespace {

// M^-1 m = s * (v + sum over factors of U (gain * (U' v))), v = s * m.
template <class T> class Velocity {
 public:
  Velocity(const InverseMass<T>& mass, int64_t dim) : mass(mass), dim(dim), scaled(dim), result(dim) {
    int64_t most = 0;
    for (int64_t f = 0; f < mass.factors; ++f) most = std::max(most, mass.rank[f]);
    inside.resize(most);
  }

  // Returns M^-1 m, which is valid until the next call.
  const T* operator()(const T* momentum) {
    const T* scale = mass.scale;
    for (int64_t d = 0; d < dim; ++d) scaled[d] = result[d] = scale[d] * momentum[d];
    const T *vectors = mass.vectors, *gain = mass.gain;
    for (int64_t f = 0; f < mass.factors; ++f) {
      const int64_t start = mass.start[f], rows = mass.rows[f], rank = mass.rank[f];
      project(vectors, scaled.data() + start, rows, rank);
      for (int64_t k = 0; k < rank; ++k) inside[k] *= gain[k];
      expand(vectors, result.data() + start, rows, rank);
      vectors += rows * rank, gain += rank;
    }
    for (int64_t d = 0; d < dim; ++d) result[d] *= scale[d];
    return result.data();
  }

 private:
  // Ranks are multiples of this, so that loops over it become SIMD instructions.
  static constexpr int64_t L = RANK_MULTIPLE;

  void project(const T* vectors, const T* from, int64_t rows, int64_t rank) {
    T* to = inside.data();
    std::fill(to, to + rank, T(0));
    for (int64_t i = 0; i < rows; ++i, vectors += rank) {
      const T value = from[i];
      for (int64_t k = 0; k < rank; ++k) to[k] += value * vectors[k];
    }
  }
  void expand(const T* vectors, T* to, int64_t rows, int64_t rank) const {
    const T* from = inside.data();
    for (int64_t i = 0; i < rows; ++i, vectors += rank) {
      T sums[L] = {};
      for (int64_t k = 0; k < rank; k += L)
        for (int64_t l = 0; l < L; ++l) sums[l] += vectors[k + l] * from[k + l];
      T sum = 0;
      for (int64_t l = 0; l < L; ++l) sum += sums[l];
      to[i] += sum;
    }
  }

  const InverseMass<T>& mass;
  const int64_t dim;
  std::vector<T> scaled, result, inside;
};

}  // namespace
