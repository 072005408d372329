// Dropout on the inputs of layers during training.
#pragma once

#include <cstdint>

#include "layout.h"
#include "vectors.h"

namespace {

// Masks of one step: a value is dropped where its uniform number is at least 1 - rate, else divided by 1 - rate.
template <class T> struct Masks {
  const T* const* uniform;  // [layer] to [input][padded row], null for a layer without dropout
  const T* rate;            // [layer]
  int64_t padded;
};

// Computes to[unit][r] = from[unit][r] * mask, and multiplies `derivative` by the mask where given; `linear` means that
// it has not been written yet and is 1.
template <class T>
void apply_mask(const T* uniform, int64_t padded, T rate, int64_t units, int64_t rows, const T* from, int64_t pitch,
                T* to, T* derivative, bool linear) {
  const T keep = T(1) - rate, gain = T(1) / keep;
  for (int64_t i = 0; i < units; ++i)
    for (int64_t r = 0; r < rows; r += Lanes<T>::N) {
      const Vec<T> u = *(const Vec<T>*)(uniform + i * padded + r);
      const Vec<T> mask = u < keep ? broadcast(gain) : broadcast(T(0));
      *(Vec<T>*)(to + i * PITCH + r) = *(const Vec<T>*)(from + i * pitch + r) * mask;
      if (derivative) {
        Vec<T>& d = *(Vec<T>*)(derivative + i * PITCH + r);
        d = linear ? mask : d * mask;
      }
    }
}

}  // namespace
