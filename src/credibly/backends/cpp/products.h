// Products of wide layers in float32, in registers.
//
// Values of a layer are [unit][row], as in mlp.cpp. What differs is the gradient of the weights: inputs lie along the vectors
// there, so that a sum over the rows stays in its lane. Every sum is made whole, in the order of what it runs over.
#pragma once

#include <cstdint>

#include "network.h"
#include "vectors.h"

namespace {

typedef Vec<float> Reals;
constexpr int L = Lanes<float>::N;
constexpr int SUMS = BYTES == 64 ? 4 : 2;  // vectors of sums for each of some units: as many as registers hold
constexpr int UNITS = 6;
typedef float Loose __attribute__((vector_size(BYTES), aligned(4), may_alias));  // a vector at any place

inline Reals load(const float* at) { return *(const Loose*)at; }
inline void store(float* at, Reals v) { *(Loose*)at = v; }

// out[j][r] = act(b[j] + sum_i w[j sj + i si] in[i][r]) for J units and V vectors of rows, with `slope` and `times` as in mlp.cpp.
struct Affine {
  const float* w;
  int64_t sj, si;
  const float *b, *in;
  int64_t in_pitch, inner;
  float *out, *slope;
  int64_t out_pitch, act;
  const float* times;
};

template <int J, int V> inline void units(const Affine& a, int64_t j0, int64_t r) {
  Reals sum[J][V];
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) sum[j][v] = all(a.b ? a.b[j0 + j] : 0.0f);
  const float *w = a.w + j0 * a.sj, *in = a.in + r;
  for (int64_t i = 0; i < a.inner; ++i, w += a.si, in += a.in_pitch) {
    Reals x[V];
    for (int v = 0; v < V; ++v) x[v] = *(const Reals*)(in + v * L);
    for (int j = 0; j < J; ++j)
      for (int v = 0; v < V; ++v) sum[j][v] += w[j * a.sj] * x[v];
  }
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) {
      const int64_t at = (j0 + j) * a.out_pitch + r + v * L;
      Reals value = sum[j][v], rate;
      if (a.times) value *= *(const Reals*)(a.times + at);
      if (a.act != NONE) {
        activate<float>(a.act, sum[j][v], value, rate);
        *(Reals*)(a.slope + at) = rate;
      }
      *(Reals*)(a.out + at) = value;
    }
}

template <int J> inline void rows_of(const Affine& a, int64_t j, int64_t rows) {
  int64_t r = 0;
  for (; r + SUMS * L <= rows; r += SUMS * L) units<J, SUMS>(a, j, r);
  for (; r + 2 * L <= rows; r += 2 * L) units<J, 2>(a, j, r);
  for (; r < rows; r += L) units<J, 1>(a, j, r);
}

void affine(const Affine& a, int64_t first, int64_t last, int64_t rows) {
  int64_t j = first;
  for (; j + UNITS <= last; j += UNITS) rows_of<UNITS>(a, j, rows);
  for (; j + 2 <= last; j += 2) rows_of<2>(a, j, rows);
  for (; j < last; ++j) rows_of<1>(a, j, rows);
}

// gradient[j inputs + i] = sum_r delta[j][r] panel[r][i], or more of it, for J units and V vectors of inputs, `width` numbers.
template <int J, int V>
inline void products(const float* delta, int64_t pitch, const float* panel, int64_t rows, float* gradient, int64_t inputs, int64_t width,
                     bool more) {
  Reals sum[J][V];
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) sum[j][v] = all(0.0f);
  for (int64_t r = 0; r < rows; ++r, panel += SUMS * L) {
    Reals x[V];
    for (int v = 0; v < V; ++v) x[v] = *(const Reals*)(panel + v * L);
    for (int j = 0; j < J; ++j)
      for (int v = 0; v < V; ++v) sum[j][v] += delta[j * pitch + r] * x[v];
  }
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) {
      float* at = gradient + j * inputs + v * L;
      const int64_t here = width - v * L;
      if (here >= L) {
        store(at, more ? load(at) + sum[j][v] : sum[j][v]);
      } else {
        for (int64_t k = 0; k < here; ++k) at[k] = more ? at[k] + sum[j][v][k] : sum[j][v][k];
      }
    }
}

template <int V>
void panel_products(const float* delta, int64_t pitch, int64_t outer, const float* panel, int64_t rows, float* gradient, int64_t inputs,
                    int64_t width, bool more) {
  int64_t j = 0;
#define PRODUCTS(J)                                                                                                         \
  for (; j + J <= outer; j += J) products<J, V>(delta + j * pitch, pitch, panel, rows, gradient + j * inputs, inputs, width, more)
  PRODUCTS(UNITS);
  PRODUCTS(2);
  PRODUCTS(1);
#undef PRODUCTS
}

// to[k][n] = from[n][k] for up to as many n as a vector has lanes.
inline void columns(const float* const* from, int64_t count, int64_t length, float* to, int64_t pitch) {
  if (count == L)
    for (int64_t k = 0; k < length; ++k)
      for (int n = 0; n < L; ++n) to[k * pitch + n] = from[n][k];
  else
    for (int64_t k = 0; k < length; ++k)
      for (int64_t n = 0; n < count; ++n) to[k * pitch + n] = from[n][k];
}

}  // namespace
