// The log likelihood of some rows under a wide network in float32, and its gradient: by one thread, or by several.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "likelihood.h"
#include "network.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int64_t MOST = 128;  // rows of a tile
constexpr int64_t SHARE = 4 * UNITS;  // units of a job

// The data as they are: x (count, inputs) and y (count, targets), class numbers as reals.
struct Table {
  const float *x, *y;
  int64_t columns;             // of y
};

inline int64_t padded(int64_t rows) { return (rows + L - 1) / L * L; }

class Batch {
 public:
  Batch(const Network& net, const Rows& data, const Table& table, int64_t size, Team* team)
      : own(data), net(net), table(table), size(size), team(team), values(net.layers), slopes(net.layers) {
    const int64_t tiles = (size + MOST - 1) / MOST, last = net.layers - 1, crew = team ? team->size() : 1;
    pitch = padded((size + tiles - 1) / tiles);
    int64_t widest = 1, units = net.inputs[0] + table.columns;
    for (int64_t l = 0; l < net.layers; ++l) {
      widest = net.inputs[l] > widest ? net.inputs[l] : widest;
      units += 2 * net.outputs[l];
    }
    const int64_t panel = SUMS * L * pitch;
    const int64_t wanted = (units + 2 * widest) * pitch + 2 * net.outputs[last] * PITCH + crew * panel;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64)));
    if (!memory) throw std::bad_alloc();
    std::memset(memory.get(), 0, wanted * sizeof(float));
    float* at = memory.get();
    auto take = [&](int64_t count) { return at += count, at - count; };
    x = take(net.inputs[0] * pitch), y = take(table.columns * pitch);
    for (int64_t l = 0; l < net.layers; ++l) {
      const int64_t each = net.outputs[l] * (l == last ? PITCH : pitch);
      values[l] = take(each), slopes[l] = take(each);
    }
    for (float*& one : delta) one = take(widest * pitch);
    for (int64_t g = 0; g < crew; ++g) panels.push_back(take(panel));
  }
  Batch(const Batch&) = delete;

  // Writes the gradient of the log likelihood of these rows, or of all; returns its value where wanted.
  double evaluate(const float* theta, float* gradient, const int64_t* rows, bool value) {
    const int64_t scales = own.log_scale < 0 ? 0 : own.per_target ? own.targets : 1;
    for (int64_t k = 0; k < scales; ++k) gradient[own.log_scale + k] = 0;
    double sum = 0;
    for (int64_t first = 0; first < size; first += pitch) {
      const int64_t count = size - first < pitch ? size - first : pitch;
      gather(rows, first, count);
      forward(theta, padded(count));
      own.count = count, own.padded = pitch, own.y = y;
      sum += likelihood<float>(own, theta, values[net.layers - 1], 0, padded(count), value, gradient);
      backward(theta, gradient, count, first > 0);
    }
    return sum;
  }

  // work(thread, job) for all jobs, by the threads that there are for this chain.
  void share(int64_t jobs, const std::function<void(int, int64_t)>& work) {
    if (team) return team->each(jobs, work);
    for (int64_t j = 0; j < jobs; ++j) work(0, j);
  }

  Rows own;

 private:
  void gather(const int64_t* rows, int64_t first, int64_t count) {
    const int64_t inputs = net.inputs[0];
    share((count + L - 1) / L, [&](int, int64_t job) {
      const float* from[L];
      const int64_t start = job * L, here = count - start < L ? count - start : L;
      for (int64_t n = 0; n < here; ++n) {
        const int64_t row = rows ? rows[first + start + n] : first + start + n;
        from[n] = table.x + row * inputs;
        for (int64_t k = 0; k < table.columns; ++k) y[k * pitch + start + n] = table.y[row * table.columns + k];
      }
      columns(from, here, inputs, x + start, pitch);
    });
  }

  void forward(const float* theta, int64_t rows) {
    for (int64_t l = 0; l < net.layers; ++l) {
      const Affine a = {theta + net.weight[l], net.inputs[l], 1, net.bias[l] < 0 ? nullptr : theta + net.bias[l], l ? values[l - 1] : x,
                        pitch, net.inputs[l], values[l], slopes[l], l + 1 == net.layers ? PITCH : pitch, net.activation[l], nullptr};
      in_shares(a, net.outputs[l], rows);
    }
  }

  void in_shares(const Affine& a, int64_t outer, int64_t rows) {
    share((outer + SHARE - 1) / SHARE, [&](int, int64_t job) {
      affine(a, job * SHARE, outer < (job + 1) * SHARE ? outer : (job + 1) * SHARE, rows);
    });
  }

  void backward(const float* theta, float* gradient, int64_t count, bool more) {
    const int64_t last = net.layers - 1, rows = padded(count);
    float* step = values[last];
    int64_t step_pitch = PITCH;
    if (net.activation[last] != NONE)
      for (int64_t k = 0; k < net.outputs[last] * PITCH; ++k) step[k] *= slopes[last][k];
    for (int64_t l = last; l >= 0; --l) {
      const int64_t inputs = net.inputs[l], outputs = net.outputs[l], wide = SUMS * L;
      const float* in = l ? values[l - 1] : x;
      share((inputs + wide - 1) / wide, [&](int me, int64_t job) {
        const int64_t i = job * wide, width = inputs - i < wide ? inputs - i : wide;
        for (int64_t k = 0; k < width; k += L) {
          const float* from[L];
          for (int n = 0; n < L; ++n) from[n] = in + (i + k + n) * pitch;
          columns(from, width - k < L ? width - k : L, count, panels[me] + k, wide);
        }
        float* to = gradient + net.weight[l] + i;
        const auto run = width > 3 * L && SUMS > 3 ? panel_products<SUMS> : width > 2 * L && SUMS > 2 ? panel_products<SUMS - 1>
                         : width > L ? panel_products<2> : panel_products<1>;
        run(step, step_pitch, outputs, panels[me], count, to, inputs, width, more);
      });
      if (net.bias[l] >= 0)
        for (int64_t j = 0; j < outputs; ++j) {
          Reals sum = all(0.0f);
          for (int64_t r = 0; r < rows; r += L) sum += *(const Reals*)(step + j * step_pitch + r);
          float& bias = gradient[net.bias[l] + j];
          bias = (more ? bias : 0) + total<float>(sum);
        }
      if (l) {
        float* next = delta[l % 2];
        const Affine a = {theta + net.weight[l], 1, inputs, nullptr, step, step_pitch, outputs, next, nullptr, pitch, NONE,
                          net.activation[l - 1] == NONE ? nullptr : slopes[l - 1]};
        in_shares(a, inputs, rows);
        step = next, step_pitch = pitch;
      }
    }
  }

  struct Free {
    void operator()(float* at) const { std::free(at); }
  };
  const Network& net;
  const Table& table;
  int64_t size, pitch;
  Team* team;
  std::unique_ptr<float, Free> memory;
  std::vector<float*> values, slopes, panels;
  float *x, *y, *delta[2];
};

}  // namespace
