// Forward and backward pass of a small network on one tile of rows: the three products, and their working memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "layout.h"
#include "likelihood.h"
#include "masks.h"
#include "memory.h"
#include "vectors.h"

namespace {

// -- the three products of a layer ---------------------------------------------------------------------------------
// out[j][r] = act(b[j] + sum_i w[j sj + i si] in[i][r]) for J units. Writes the derivative of the activation to
// `derivative` and multiplies the sums by `factor` where these are given (in the backward pass, `factor` is the
// derivative of the previous layer).
template <class T, int J>
inline void units(const T* w, int64_t sj, int64_t si, const T* b, const T* in, int64_t in_pitch, int64_t inner,
                  int64_t rows, T* out, T* derivative, int64_t act, const T* factor) {
  constexpr int L = Lanes<T>::N;
  for (int64_t r = 0; r < rows; r += 2 * L) {
    Vec<T> sum[J][2];
    for (int j = 0; j < J; ++j) sum[j][0] = sum[j][1] = broadcast(b ? b[j] : T(0));
    for (int64_t i = 0; i < inner; ++i) {
      const Vec<T> u = *(const Vec<T>*)(in + i * in_pitch + r), v = *(const Vec<T>*)(in + i * in_pitch + r + L);
      for (int j = 0; j < J; ++j) {
        const T weight = w[j * sj + i * si];
        sum[j][0] += weight * u;
        sum[j][1] += weight * v;
      }
    }
    for (int j = 0; j < J; ++j)
      for (int h = 0; h < 2; ++h) {
        const int64_t at = j * PITCH + r + h * L;
        *(Vec<T>*)(out + at) = factor ? sum[j][h] * *(const Vec<T>*)(factor + at) : sum[j][h];
      }
    // A separate loop: its body is too long to unroll, and the sums above would be kept in memory, not in registers.
    for (int j = 0; j < J && act != NONE; ++j)
      for (int h = 0; h < 2; ++h) {
        const int64_t at = j * PITCH + r + h * L;
        Vec<T>& value = *(Vec<T>*)(out + at);
        if (derivative)
          activate<T>(act, Vec<T>(value), value, *(Vec<T>*)(derivative + at));
        else
          value = activated<T>(act, value);
      }
  }
}

template <class T>
void affine(const T* w, int64_t sj, int64_t si, const T* b, const T* in, int64_t in_pitch, int64_t inner, int64_t outer,
            int64_t rows, T* out, T* derivative, int64_t act, const T* factor) {
  int64_t j = 0;
#define UNITS(J)                                                                                     \
  for (; j + J <= outer; j += J)                                                                     \
  units<T, J>(w + j * sj, sj, si, b ? b + j : nullptr, in, in_pitch, inner, rows, out + j * PITCH,   \
              derivative ? derivative + j * PITCH : nullptr, act, factor ? factor + j * PITCH : nullptr)
  UNITS(UNIT_BLOCK);
  UNITS(4);
  UNITS(2);
  UNITS(1);
#undef UNITS
}

// gradient[j sj + i] += sum_r delta[j][r] in[i][r] for J units and I inputs.
template <class T, int J, int I>
inline void products(const T* delta, const T* in, int64_t in_pitch, int64_t rows, T* gradient, int64_t sj) {
  constexpr int L = Lanes<T>::N;
  Vec<T> sum[J][I];
  for (int j = 0; j < J; ++j)
    for (int i = 0; i < I; ++i) sum[j][i] = broadcast(T(0));
  for (int64_t r = 0; r < rows; r += L) {
    Vec<T> d[J];
    for (int j = 0; j < J; ++j) d[j] = *(const Vec<T>*)(delta + j * PITCH + r);
    for (int i = 0; i < I; ++i) {
      Vec<T> v = *(const Vec<T>*)(in + i * in_pitch + r);
      KEEP_IN_REGISTER(v);
      for (int j = 0; j < J; ++j) sum[j][i] += d[j] * v;
    }
  }
  for (int j = 0; j < J; ++j)
    for (int i = 0; i < I; ++i) gradient[j * sj + i] += horizontal_sum<T>(sum[j][i]);
}

template <class T, int J>
inline void unit_products(const T* delta, const T* in, int64_t in_pitch, int64_t inner, int64_t rows, T* gradient,
                          int64_t sj) {
  // Enough independent sums to hide the latency of an addition.
  constexpr int WIDE = J == 1 ? 2 * INPUT_BLOCK : INPUT_BLOCK;
  int64_t i = 0;
  for (; i + WIDE <= inner; i += WIDE)
    products<T, J, WIDE>(delta, in + i * in_pitch, in_pitch, rows, gradient + i, sj);
  for (; i < inner; ++i) products<T, J, 1>(delta, in + i * in_pitch, in_pitch, rows, gradient + i, sj);
}

template <class T>
void weight_gradient(const T* delta, int64_t outer, const T* in, int64_t in_pitch, int64_t inner, int64_t rows,
                     T* gradient) {
  int64_t j = 0;
#define PRODUCTS(J)                \
  for (; j + J <= outer; j += J)   \
  unit_products<T, J>(delta + j * PITCH, in, in_pitch, inner, rows, gradient + j * inner, inner)
  PRODUCTS(4);
  PRODUCTS(2);
  PRODUCTS(1);
#undef PRODUCTS
}

// gradient[j] += sum_r delta[j][r] for J units.
template <class T, int J> inline void row_sums(const T* delta, int64_t rows, T* gradient) {
  Vec<T> sum[J];
  for (int j = 0; j < J; ++j) sum[j] = broadcast(T(0));
  for (int64_t r = 0; r < rows; r += Lanes<T>::N)
    for (int j = 0; j < J; ++j) sum[j] += *(const Vec<T>*)(delta + j * PITCH + r);
  for (int j = 0; j < J; ++j) gradient[j] += horizontal_sum<T>(sum[j]);
}

// -- one tile of rows ----------------------------------------------------------------------------------------------
template <class T> class Workspace {
 public:
  Workspace(const Network& net) : net(net), values(new T*[net.layers]), derivatives(new T*[net.layers]) {
    int64_t widest = 1, size = net.inputs[0];
    for (int64_t l = 0; l < net.layers; ++l) {
      widest = net.outputs[l] > widest ? net.outputs[l] : widest;
      size += 2 * net.outputs[l];
    }
    memory = allocate_aligned<T>((size + 2 * widest) * PITCH);
    T* at = memory.get();
    for (int64_t l = 0; l < net.layers; ++l) {
      values[l] = at, at += net.outputs[l] * PITCH;
      derivatives[l] = at, at += net.outputs[l] * PITCH;
    }
    delta[0] = at, delta[1] = at + widest * PITCH, masked_input = at + 2 * widest * PITCH;
  }
  ~Workspace() {
    delete[] values;
    delete[] derivatives;
  }
  Workspace(const Workspace&) = delete;

  // Writes the outputs of the network to values[last]. Starts at layer `from`; `back` asks for derivatives.
  void forward(const T* x, int64_t x_pitch, const T* theta, int64_t rows, bool back, int64_t from = 0) {
    const T* in = from ? values[from - 1] : x;
    int64_t pitch = from ? PITCH : x_pitch;
    for (int64_t l = from; l < net.layers; ++l) {
      const T* bias = net.bias[l] < 0 ? nullptr : theta + net.bias[l];
      affine<T>(theta + net.weight[l], net.inputs[l], 1, bias, in, pitch, net.inputs[l], net.outputs[l], rows,
                values[l], back ? derivatives[l] : nullptr, net.activation[l], nullptr);
      in = values[l], pitch = PITCH;
      if (has_mask(l + 1)) mask_values(l + 1, values[l], PITCH, rows, values[l], derivatives[l]);
    }
  }

  // Copies the outputs to out[row][output].
  void store(int64_t rows, T* out) const {
    const int64_t K = net.outputs[net.layers - 1];
    const T* last = values[net.layers - 1];
    if (K == 1) std::memcpy(out, last, rows * sizeof(T));
    for (int64_t r = 0; r < rows && K > 1; ++r)
      for (int64_t k = 0; k < K; ++k) out[r * K + k] = last[k * PITCH + r];
  }

  // Adds the gradient of the log likelihood of the tile to `gradient`. Returns the log likelihood if `value` is set.
  double evaluate(const Data<T>& data, const T* theta, int64_t first, int64_t rows, bool value, T* gradient) {
    const T* x = data.x + first;
    int64_t pitch = data.padded;
    this->first = first;
    if (has_mask(0)) {
      mask_values(0, x, pitch, rows, masked_input, nullptr);
      x = masked_input, pitch = PITCH;
    }
    forward(x, pitch, theta, rows, true);
    const int64_t last = net.layers - 1;
    T* upstream = values[last];
    const double sum = likelihood<T>(data, theta, upstream, first, rows, value, gradient);
    if (net.activation[last] != NONE)
      for (int64_t k = 0; k < net.outputs[last] * PITCH; ++k) upstream[k] *= derivatives[last][k];
    backward(x, pitch, theta, upstream, rows, gradient);
    return sum;
  }

  // Adds to `gradient` what follows from the derivatives `upstream` with respect to the sums of the last layer.
  void backward(const T* x, int64_t pitch, const T* theta, T* upstream, int64_t rows, T* gradient) {
    for (int64_t l = net.layers - 1; l >= 0; --l) {
      weight_gradient<T>(upstream, net.outputs[l], l ? values[l - 1] : x, l ? PITCH : pitch, net.inputs[l], rows,
                         gradient + net.weight[l]);
      if (net.bias[l] >= 0) {
        T* bias = gradient + net.bias[l];
        int64_t j = 0;
        for (; j + 8 <= net.outputs[l]; j += 8) row_sums<T, 8>(upstream + j * PITCH, rows, bias + j);
        for (; j < net.outputs[l]; ++j) row_sums<T, 1>(upstream + j * PITCH, rows, bias + j);
      }
      if (l) {
        T* next = delta[l % 2];
        const T* factor = net.activation[l - 1] == NONE && !has_mask(l) ? nullptr : derivatives[l - 1];
        affine<T>(theta + net.weight[l], 1, net.inputs[l], nullptr, upstream, PITCH, net.outputs[l], net.inputs[l],
                  rows, next, nullptr, NONE, factor);
        upstream = next;
      }
    }
  }

  const Network& net;
  const Masks<T>* masks = nullptr;  // dropout on the inputs of layers, in `evaluate`
  T **values, **derivatives;
  T *delta[2], *masked_input;
  Aligned<T> memory;

 private:
  bool has_mask(int64_t l) const { return masks && l < net.layers && masks->uniform[l]; }
  void mask_values(int64_t l, const T* from, int64_t pitch, int64_t rows, T* to, T* derivative) {
    apply_mask<T>(masks->uniform[l] + first, masks->padded, masks->rate[l], net.inputs[l], rows, from, pitch, to,
                  derivative, l == 0 || net.activation[l - 1] == NONE);
  }
  int64_t first = 0;
};

// Rows of a tile: tiles of about equal size, a multiple of ROW_MULTIPLE.
inline int64_t tile_rows(int64_t padded) {
  const int64_t tiles = (padded + TILE - 1) / TILE, even = (padded + tiles - 1) / tiles;
  return (even + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
}

}  // namespace
