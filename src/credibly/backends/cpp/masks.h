// Dropout on the inputs of layers while a network trains.
#pragma once

#include <cstdint>

#include "network.h"
#include "vectors.h"

namespace {

// What a step drops: a value where its uniform number is not below 1 - rate; the others are divided by that.
template <class T> struct Masks {
  const T* const* uniform;     // of each layer [input][padded row], or null where nothing is dropped
  const T* rate;               // of each layer
  int64_t padded;
};

// to[unit][r] = from[unit][r] times the mask, and the derivative of it where there is one; `slope` is 1 so far where `straight`.
template <class T>
void drop(const T* uniform, int64_t padded, T rate, int64_t units, int64_t rows, const T* from, int64_t pitch, T* to, T* slope,
          bool straight) {
  const T keep = T(1) - rate, gain = T(1) / keep;
  for (int64_t i = 0; i < units; ++i)
    for (int64_t r = 0; r < rows; r += Lanes<T>::N) {
      const Vec<T> u = *(const Vec<T>*)(uniform + i * padded + r);
      const Vec<T> mask = u < keep ? all(gain) : all(T(0));
      *(Vec<T>*)(to + i * PITCH + r) = *(const Vec<T>*)(from + i * pitch + r) * mask;
      if (slope) {
        Vec<T>& s = *(Vec<T>*)(slope + i * PITCH + r);
        s = straight ? mask : s * mask;
      }
    }
}

}  // namespace
