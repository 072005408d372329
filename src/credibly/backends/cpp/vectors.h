// SIMD vectors and elementwise functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "api.h"

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, UNIT_BLOCK = 8, INPUT_BLOCK = 4;
#elif defined(__AVX__)
constexpr int BYTES = 32, UNIT_BLOCK = 4, INPUT_BLOCK = 2;
#else
constexpr int BYTES = 16, UNIT_BLOCK = 4, INPUT_BLOCK = 2;
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

// Not {} + v: the addition would turn -0 into 0.
template <class T> inline Vec<T> broadcast(T v) { return v - Vec<T>{}; }

// Keeps nan.
inline Vec<float> clamp(Vec<float> x, float low, float high) {
#if defined(__AVX512F__)  // two instructions; the compiler turns the other branch into four
  return (Vec<float>)_mm512_min_ps((__m512)broadcast(high), _mm512_max_ps((__m512)broadcast(low), (__m512)x));
#else
  x = x < low ? broadcast(low) : x;
  return x > high ? broadcast(high) : x;
#endif
}

// e^x = 2^n e^r with |r| <= log(2)/2. The polynomial is the minimax one in relative error (9e-8) of degree 5 with
// p(0) = 1. log(2) as a float has a relative error of 3e-9, so one constant suffices for x - n log(2) where the product
// is not rounded; elsewhere the first of two has few enough digits for that.
inline Vec<float> vexp(Vec<float> x) {
  x = clamp(x, -87.0f, 88.0f);
  const Vec<float> shifted = x * 1.44269504f + 12582912.0f;
  const Vec<float> n = shifted - 12582912.0f;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const Vec<float> r = x - n * 0.693147182f;
#else
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
#endif
  Vec<float> p = r * 8.28936044e-3f + 4.18981761e-2f;
  p = p * r + 1.66676521e-1f;
  p = p * r + 4.99991477e-1f;
  p = p * r + 9.99999702e-1f;
  p = p * r + 1.0f;
  typedef Lanes<float>::I I;
  const I bits = ((I)shifted) << 23;
  return (Vec<float>)((I)p + bits);
}

// The same with a Taylor series of degree 12.
inline Vec<double> vexp(Vec<double> x) {
  x = x < -708.0 ? broadcast(-708.0) : x;
  x = x > 709.0 ? broadcast(709.0) : x;
  const Vec<double> shifted = x * 1.4426950408889634 + 6755399441055744.0;
  const Vec<double> n = shifted - 6755399441055744.0;
  const Vec<double> r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double term = 1.0 / 479001600.0;
  Vec<double> p = broadcast(term);
  for (int k = 12; k > 2; --k) {
    term *= k;
    p = p * r + term;
  }
  p = p * r * r + r + 1.0;
  typedef Lanes<double>::I I;
  const I bits = ((I)shifted) << 52;
  return (Vec<double>)((I)p + bits);
}

template <class T> inline Vec<T> sigmoid(Vec<T> x) { return T(1) / (T(1) + vexp(-x)); }

// Value and derivative of an activation; `activated` returns the value alone.
template <class T> inline void activate(int64_t kind, Vec<T> a, Vec<T>& value, Vec<T>& derivative) {
  if (kind == RELU) {
    derivative = a > T(0) ? broadcast(T(1)) : broadcast(T(0));
    value = a > T(0) ? a : broadcast(T(0));
  } else if (kind == SILU) {
    const Vec<T> s = sigmoid<T>(a);
    value = a * s;
    derivative = s * (T(1) + a * (T(1) - s));
  } else if (kind == TANH) {
    // 1 - 2 / (e^2a + 1) cancels near zero; the Taylor series of five terms does not.
    const Vec<T> e = vexp(a + a), square = a * a;
    const Vec<T> far = T(1) - T(2) / (e + T(1));
    const T switch_at = sizeof(T) == 4 ? T(0.18) : T(0.02);
    const Vec<T> series =
        a + a * square * (T(-1.0 / 3) + square * (T(2.0 / 15) + square * (T(-17.0 / 315) + square * T(62.0 / 2835))));
    value = square < switch_at * switch_at ? series : far;
    derivative = T(1) - value * value;
  } else if (kind == SIGMOID) {
    value = sigmoid<T>(a);
    derivative = value * (T(1) - value);
  } else {
    value = a;
    derivative = broadcast(T(1));
  }
}

template <class T> inline Vec<T> activated(int64_t kind, Vec<T> a) {
  if (kind == SILU) return a / (T(1) + vexp(-a));
  Vec<T> value, derivative;
  activate<T>(kind, a, value, derivative);
  return value;
}

template <class T> inline T horizontal_sum(const Vec<T>& v) {
  constexpr int HALF = BYTES / 2;
  typedef T H __attribute__((vector_size(HALF)));
  const Vec<T> held = v;  // a copy, or the caller's accumulator would live in memory
  H low, high;
  std::memcpy(&low, &held, HALF);
  std::memcpy(&high, reinterpret_cast<const char*>(&held) + HALF, HALF);
  low += high;
  constexpr unsigned COUNT = HALF / sizeof(T);
  if (COUNT == 1) return low[0];
  T left = 0, right = 0;
  for (unsigned k = 0; k + 1 < COUNT; k += 2) left += low[k], right += low[k + 1];
  return left + right;
}

// Keeps a vector that is used several times in a register; the compiler would reload it for each use.
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(v) asm("" : "+v"(v))
#else
#define KEEP_IN_REGISTER(v)
#endif

}  // namespace
