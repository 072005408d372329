// Log likelihood of a minibatch under a wide network in float32, and its gradient, by one thread or several.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "api.h"
#include "layout.h"
#include "likelihood.h"
#include "memory.h"
#include "thread_pool.h"
#include "vectors.h"
#include "wide_products.h"

namespace {

constexpr int64_t MAX_TILE = 128;  // rows
constexpr int64_t UNITS_PER_JOB = 4 * WIDE_UNITS;

inline int64_t whole_vectors(int64_t rows) { return (rows + L - 1) / L * L; }

class WideBatch {
 public:
  WideBatch(const WideDensity& density, int64_t size, double weight, ThreadPool* pool)
      : batch_data(density.data), net(density.network), table(density.table), size(size), pool(pool),
        values(net.layers), derivatives(net.layers) {
    batch_data.weight = weight;
    const int64_t tiles = (size + MAX_TILE - 1) / MAX_TILE, last = net.layers - 1, threads = pool ? pool->size() : 1;
    pitch = whole_vectors((size + tiles - 1) / tiles);
    int64_t widest = 1, units = net.inputs[0] + table.columns;
    for (int64_t l = 0; l < net.layers; ++l) {
      widest = net.inputs[l] > widest ? net.inputs[l] : widest;
      units += 2 * net.outputs[l];
    }
    const int64_t panel = SUM_VECTORS * L * pitch;
    const int64_t wanted = (units + 2 * widest) * pitch + 2 * net.outputs[last] * PITCH + threads * panel;
    memory = allocate_aligned<float>(wanted);
    std::memset(memory.get(), 0, wanted * sizeof(float));
    float* at = memory.get();
    auto allocate = [&](int64_t count) { return at += count, at - count; };
    x = allocate(net.inputs[0] * pitch), y = allocate(table.columns * pitch);
    for (int64_t l = 0; l < net.layers; ++l) {
      const int64_t each = net.outputs[l] * (l == last ? PITCH : pitch);
      values[l] = allocate(each), derivatives[l] = allocate(each);
    }
    for (float*& one : delta) one = allocate(widest * pitch);
    for (int64_t g = 0; g < threads; ++g) panels.push_back(allocate(panel));
  }
  WideBatch(const WideBatch&) = delete;

  // Writes the gradient of the log likelihood of these rows (null for all). Returns the value if `value` is set.
  double evaluate(const float* theta, float* gradient, const int64_t* rows, bool value) {
    const int64_t scales = batch_data.log_scale < 0 ? 0 : batch_data.per_target ? batch_data.targets : 1;
    for (int64_t k = 0; k < scales; ++k) gradient[batch_data.log_scale + k] = 0;
    double sum = 0;
    for (int64_t first = 0; first < size; first += pitch) {
      const int64_t count = size - first < pitch ? size - first : pitch;
      gather(rows, first, count);
      forward(theta, whole_vectors(count));
      batch_data.rows = count, batch_data.padded = pitch, batch_data.y = y;
      sum += likelihood<float>(batch_data, theta, values[net.layers - 1], 0, whole_vectors(count), value, gradient);
      backward(theta, gradient, count, first > 0);
    }
    return sum;
  }

  // Calls task(thread, job) for every job, on the threads of this chain.
  void parallel_for(int64_t jobs, const std::function<void(int, int64_t)>& task) {
    if (pool) return pool->run(jobs, task);
    for (int64_t j = 0; j < jobs; ++j) task(0, j);
  }

 private:
  void gather(const int64_t* rows, int64_t first, int64_t count) {
    const int64_t inputs = net.inputs[0];
    parallel_for((count + L - 1) / L, [&](int, int64_t job) {
      const float* from[L];
      const int64_t start = job * L, left = count - start < L ? count - start : L;
      for (int64_t n = 0; n < left; ++n) {
        const int64_t row = rows ? rows[first + start + n] : first + start + n;
        from[n] = table.x + row * inputs;
        for (int64_t k = 0; k < table.columns; ++k) y[k * pitch + start + n] = table.y[row * table.columns + k];
      }
      transpose(from, left, inputs, x + start, pitch);
    });
  }

  void forward(const float* theta, int64_t rows) {
    for (int64_t l = 0; l < net.layers; ++l) {
      const float *bias = net.bias[l] < 0 ? nullptr : theta + net.bias[l], *in = l ? values[l - 1] : x;
      const int64_t out_pitch = l + 1 == net.layers ? PITCH : pitch;
      const Affine a = {theta + net.weight[l], net.inputs[l], 1, bias, in, pitch, net.inputs[l], values[l],
                        derivatives[l], out_pitch, net.activation[l], nullptr};
      parallel_affine(a, net.outputs[l], rows);
    }
  }

  void parallel_affine(const Affine& a, int64_t outer, int64_t rows) {
    parallel_for((outer + UNITS_PER_JOB - 1) / UNITS_PER_JOB, [&](int, int64_t job) {
      affine(a, job * UNITS_PER_JOB, outer < (job + 1) * UNITS_PER_JOB ? outer : (job + 1) * UNITS_PER_JOB, rows);
    });
  }

  void backward(const float* theta, float* gradient, int64_t count, bool accumulate) {
    const int64_t last = net.layers - 1, rows = whole_vectors(count);
    float* upstream = values[last];
    int64_t upstream_pitch = PITCH;
    if (net.activation[last] != NONE)
      for (int64_t k = 0; k < net.outputs[last] * PITCH; ++k) upstream[k] *= derivatives[last][k];
    for (int64_t l = last; l >= 0; --l) {
      const int64_t inputs = net.inputs[l], outputs = net.outputs[l], wide = SUM_VECTORS * L;
      const float* in = l ? values[l - 1] : x;
      parallel_for((inputs + wide - 1) / wide, [&](int thread, int64_t job) {
        const int64_t i = job * wide, width = inputs - i < wide ? inputs - i : wide;
        for (int64_t k = 0; k < width; k += L) {
          const float* from[L];
          for (int n = 0; n < L; ++n) from[n] = in + (i + k + n) * pitch;
          transpose(from, width - k < L ? width - k : L, count, panels[thread] + k, wide);
        }
        float* to = gradient + net.weight[l] + i;
        const auto run = width > 3 * L && SUM_VECTORS > 3   ? panel_products<SUM_VECTORS>
                         : width > 2 * L && SUM_VECTORS > 2 ? panel_products<SUM_VECTORS - 1>
                         : width > L                        ? panel_products<2>
                                                            : panel_products<1>;
        run(upstream, upstream_pitch, outputs, panels[thread], count, to, inputs, width, accumulate);
      });
      if (net.bias[l] >= 0)
        for (int64_t j = 0; j < outputs; ++j) {
          Reals sum = broadcast(0.0f);
          for (int64_t r = 0; r < rows; r += L) sum += *(const Reals*)(upstream + j * upstream_pitch + r);
          float& bias = gradient[net.bias[l] + j];
          bias = (accumulate ? bias : 0) + horizontal_sum<float>(sum);
        }
      if (l) {
        float* next = delta[l % 2];
        const float* factor = net.activation[l - 1] == NONE ? nullptr : derivatives[l - 1];
        const Affine a = {theta + net.weight[l], 1, inputs, nullptr, upstream, upstream_pitch, outputs, next, nullptr,
                          pitch, NONE, factor};
        parallel_affine(a, inputs, rows);
        upstream = next, upstream_pitch = pitch;
      }
    }
  }

  Data<float> batch_data;
  const Network& net;
  const Table& table;
  int64_t size, pitch;
  ThreadPool* pool;
  Aligned<float> memory;
  std::vector<float*> values, derivatives, panels;
  float *x, *y, *delta[2];
};

}  // namespace
