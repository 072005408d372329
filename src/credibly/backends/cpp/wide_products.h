// Products of wide layers in float32, accumulated in registers.
//
// Values of a layer are [unit][row], as in mlp.h. The gradient of the weights differs: inputs lie along the vectors,
// so a sum over rows stays in its lane. One thread computes a sum from start to end, in the order of its index.
#pragma once

#include <cstdint>

#include "api.h"
#include "vectors.h"

namespace {

typedef Vec<float> Reals;
constexpr int L = Lanes<float>::N;
// Register blocking: units, and vectors of sums per unit.
constexpr int WIDE_UNITS = 6, SUM_VECTORS = BYTES == 64 ? 4 : 2;
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4), may_alias));

inline Reals load(const float* at) { return *(const Unaligned*)at; }
inline void store(float* at, Reals v) { *(Unaligned*)at = v; }

// out[j][r] = act(b[j] + sum_i w[j sj + i si] in[i][r]), with `derivative` and `factor` as in workspace.h.
struct Affine {
  const float* w;
  int64_t sj, si;
  const float *b, *in;
  int64_t in_pitch, inner;
  float *out, *derivative;
  int64_t out_pitch, act;
  const float* factor;
};

// J units and V vectors of rows.
template <int J, int V> inline void units(const Affine& a, int64_t j0, int64_t r) {
  Reals sum[J][V];
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) sum[j][v] = broadcast(a.b ? a.b[j0 + j] : 0.0f);
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
      Reals value = sum[j][v], slope;
      if (a.factor) value *= *(const Reals*)(a.factor + at);
      if (a.act != NONE) {
        activate<float>(a.act, sum[j][v], value, slope);
        *(Reals*)(a.derivative + at) = slope;
      }
      *(Reals*)(a.out + at) = value;
    }
}

template <int J> inline void unit_rows(const Affine& a, int64_t j, int64_t rows) {
  int64_t r = 0;
  for (; r + SUM_VECTORS * L <= rows; r += SUM_VECTORS * L) units<J, SUM_VECTORS>(a, j, r);
  for (; r + 2 * L <= rows; r += 2 * L) units<J, 2>(a, j, r);
  for (; r < rows; r += L) units<J, 1>(a, j, r);
}

void affine(const Affine& a, int64_t first, int64_t last, int64_t rows) {
  int64_t j = first;
  for (; j + WIDE_UNITS <= last; j += WIDE_UNITS) unit_rows<WIDE_UNITS>(a, j, rows);
  for (; j + 2 <= last; j += 2) unit_rows<2>(a, j, rows);
  for (; j < last; ++j) unit_rows<1>(a, j, rows);
}

// gradient[j inputs + i] = sum_r delta[j][r] panel[r][i], or += with `accumulate`, for J units and V vectors of inputs,
// of which the first `width` numbers count.
template <int J, int V>
inline void products(const float* delta, int64_t pitch, const float* panel, int64_t rows, float* gradient,
                     int64_t inputs, int64_t width, bool accumulate) {
  Reals sum[J][V];
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) sum[j][v] = broadcast(0.0f);
  for (int64_t r = 0; r < rows; ++r, panel += SUM_VECTORS * L) {
    Reals x[V];
    for (int v = 0; v < V; ++v) x[v] = *(const Reals*)(panel + v * L);
    for (int j = 0; j < J; ++j)
      for (int v = 0; v < V; ++v) sum[j][v] += delta[j * pitch + r] * x[v];
  }
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) {
      float* at = gradient + j * inputs + v * L;
      const int64_t left = width - v * L;
      if (left >= L) {
        store(at, accumulate ? load(at) + sum[j][v] : sum[j][v]);
      } else {
        for (int64_t k = 0; k < left; ++k) at[k] = accumulate ? at[k] + sum[j][v][k] : sum[j][v][k];
      }
    }
}

template <int V>
void panel_products(const float* delta, int64_t pitch, int64_t outer, const float* panel, int64_t rows, float* gradient,
                    int64_t inputs, int64_t width, bool accumulate) {
  int64_t j = 0;
#define PRODUCTS(J)                \
  for (; j + J <= outer; j += J)   \
  products<J, V>(delta + j * pitch, pitch, panel, rows, gradient + j * inputs, inputs, width, accumulate)
  PRODUCTS(WIDE_UNITS);
  PRODUCTS(2);
  PRODUCTS(1);
#undef PRODUCTS
}

// to[k][n] = from[n][k] for at most L values of n.
inline void transpose(const float* const* from, int64_t count, int64_t length, float* to, int64_t pitch) {
  if (count == L)
    for (int64_t k = 0; k < length; ++k)
      for (int n = 0; n < L; ++n) to[k * pitch + n] = from[n][k];
  else
    for (int64_t k = 0; k < length; ++k)
      for (int64_t n = 0; n < count; ++n) to[k * pitch + n] = from[n][k];
}

}  // namespace
