// Vectors of the processor, and functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "network.h"

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, BLOCK = 8, SIDE = 4;
#elif defined(__AVX__)
constexpr int BYTES = 32, BLOCK = 4, SIDE = 2;
#else
constexpr int BYTES = 16, BLOCK = 4, SIDE = 2;
#endif
template <class T> struct Lanes;
template <> struct Lanes<float> {
  typedef float V __attribute__((vector_size(BYTES), may_alias));
  typedef int32_t I __attribute__((vector_size(BYTES), may_alias));
  static constexpr int N = BYTES / 4;
};
template <> struct Lanes<double> {
  typedef double V __attribute__((vector_size(BYTES), may_alias));
  typedef int64_t I __attribute__((vector_size(BYTES), may_alias));
  static constexpr int N = BYTES / 8;
};
template <class T> using Vec = typename Lanes<T>::V;

// Not {} + v, which is an addition: it makes 0 of -0.
template <class T> inline Vec<T> all(T v) { return v - Vec<T>{}; }

inline Vec<float> bounded(Vec<float> x, float low, float high) {  // what is no number stays none
#if defined(__AVX512F__)                                          // two instructions; of the other the compiler makes four
  return (Vec<float>)_mm512_min_ps((__m512)all(high), _mm512_max_ps((__m512)all(low), (__m512)x));
#else
  x = x < low ? all(low) : x;
  return x > high ? all(high) : x;
#endif
}

// e^x = 2^n e^r with |r| <= log(2)/2. The polynomial has the least largest relative error of those of degree 5 with p(0) = 1, which
// is 9e-8; log(2) as a float is right to 3e-9 of itself, so that one constant does for x - n log(2).
inline Vec<float> exponential(Vec<float> x) {
  x = bounded(x, -87.0f, 88.0f);
  const Vec<float> shifted = x * 1.44269504f + 12582912.0f;
  const Vec<float> r = x - (shifted - 12582912.0f) * 0.693147182f;
  Vec<float> p = r * 8.28936044e-3f + 4.18981761e-2f;
  p = p * r + 1.66676521e-1f;
  p = p * r + 4.99991477e-1f;
  p = p * r + 9.99999702e-1f;
  p = p * r + 1.0f;
  typedef Lanes<float>::I I;
  const I bits = ((I)shifted) << 23;
  return (Vec<float>)((I)p + bits);
}

inline Vec<double> exponential(Vec<double> x) {  // the same with a series of degree 12
  x = x < -708.0 ? all(-708.0) : x;
  x = x > 709.0 ? all(709.0) : x;
  const Vec<double> shifted = x * 1.4426950408889634 + 6755399441055744.0;
  const Vec<double> n = shifted - 6755399441055744.0;
  const Vec<double> r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double term = 1.0 / 479001600.0;
  Vec<double> p = all(term);
  for (int k = 12; k > 2; --k) {
    term *= k;
    p = p * r + term;
  }
  p = p * r * r + r + 1.0;
  typedef Lanes<double>::I I;
  const I bits = ((I)shifted) << 52;
  return (Vec<double>)((I)p + bits);
}

template <class T> inline Vec<T> sigmoid(Vec<T> x) { return T(1) / (T(1) + exponential(-x)); }

// Value and derivative of an activation; the value alone has a function below.
template <class T> inline void activate(int64_t kind, Vec<T> a, Vec<T>& value, Vec<T>& slope) {
  if (kind == RELU) {
    slope = a > T(0) ? all(T(1)) : all(T(0));
    value = a > T(0) ? a : all(T(0));
  } else if (kind == SILU) {
    const Vec<T> s = sigmoid<T>(a);
    value = a * s;
    slope = s * (T(1) + a * (T(1) - s));
  } else if (kind == TANH) {
    // 1 - 2 / (e^2a + 1) loses digits near zero, where the odd series of five terms has them.
    const Vec<T> e = exponential(a + a), square = a * a;
    const Vec<T> far = T(1) - T(2) / (e + T(1));
    const T edge = sizeof(T) == 4 ? T(0.18) : T(0.02);
    const Vec<T> near = a + a * square * (T(-1.0 / 3) + square * (T(2.0 / 15) + square * (T(-17.0 / 315) + square * T(62.0 / 2835))));
    value = square < edge * edge ? near : far;
    slope = T(1) - value * value;
  } else if (kind == SIGMOID) {
    value = sigmoid<T>(a);
    slope = value * (T(1) - value);
  } else {
    value = a;
    slope = all(T(1));
  }
}

template <class T> inline Vec<T> activated(int64_t kind, Vec<T> a) {
  if (kind == SILU) return a / (T(1) + exponential(-a));
  Vec<T> value, slope;
  activate<T>(kind, a, value, slope);
  return value;
}

template <class T> inline T total(const Vec<T>& v) {
  constexpr int HALF = BYTES / 2;
  typedef T H __attribute__((vector_size(HALF)));
  const Vec<T> held = v;  // a copy, or the sum would live in memory while it grows
  H low, high;
  std::memcpy(&low, &held, HALF);
  std::memcpy(&high, reinterpret_cast<const char*>(&held) + HALF, HALF);
  low += high;
  T left = 0, right = 0;
  for (unsigned k = 0; k < HALF / sizeof(T); k += 2) left += low[k], right += low[k + 1];
  return left + right;
}

// Keeps a vector in a register that is used several times; left alone, the compiler loads it again for each use.
#if defined(__x86_64__)
#define HOLD(v) asm("" : "+v"(v))
#else
#define HOLD(v)
#endif

}  // namespace
