// Densities of small multilayer perceptrons and trajectories on them, each chain by itself in one thread's fast memory.
//
// Rows lie along the vectors of the processor: values of a layer are [unit][row], so that a weight is one number for a whole
// vector, and no unit count has to fit anything. Rows go in tiles whose activations stay in the second cache. A tile adds its
// own sums to the gradient, in the order of the tiles: threads change no bit, and neither do other chains.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "likelihood.h"
#include "masks.h"
#include "network.h"
#include "team.h"
#include "vectors.h"

namespace {

// -- the three products of a layer ------------------------------------------------------------------------------------------
// out[j][r] = act(b[j] + sum_i w[j sj + i si] in[i][r]) for J units; `slope` gets the derivative where it is wanted, and
// `times` multiplies the sums where given (the derivative of the layer before, on the way back).
template <class T, int J>
inline void units(const T* w, int64_t sj, int64_t si, const T* b, const T* in, int64_t in_pitch, int64_t inner,
                  int64_t rows, T* out, T* slope, int64_t act, const T* times) {
  constexpr int L = Lanes<T>::N;
  for (int64_t r = 0; r < rows; r += 2 * L) {
    Vec<T> sum[J][2];
    for (int j = 0; j < J; ++j) sum[j][0] = sum[j][1] = all(b ? b[j] : T(0));
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
        *(Vec<T>*)(out + at) = times ? sum[j][h] * *(const Vec<T>*)(times + at) : sum[j][h];
      }
    // In a loop of its own: too long to be written out for each unit, it would have all sums in memory while they grow.
    for (int j = 0; j < J && act != NONE; ++j)
      for (int h = 0; h < 2; ++h) {
        const int64_t at = j * PITCH + r + h * L;
        Vec<T>& value = *(Vec<T>*)(out + at);
        if (slope)
          activate<T>(act, Vec<T>(value), value, *(Vec<T>*)(slope + at));
        else
          value = activated<T>(act, value);
      }
  }
}

template <class T>
void affine(const T* w, int64_t sj, int64_t si, const T* b, const T* in, int64_t in_pitch, int64_t inner, int64_t outer, int64_t rows,
            T* out, T* slope, int64_t act, const T* times) {
  int64_t j = 0;
#define UNITS(J)                                                                                                             \
  for (; j + J <= outer; j += J)                                                                                             \
  units<T, J>(w + j * sj, sj, si, b ? b + j : nullptr, in, in_pitch, inner, rows, out + j * PITCH,                            \
              slope ? slope + j * PITCH : nullptr, act, times ? times + j * PITCH : nullptr)
  UNITS(BLOCK);
  UNITS(4);
  UNITS(2);
  UNITS(1);
#undef UNITS
}

// gradient[j sj + i] += sum_r delta[j][r] in[i][r] for J by I of them.
template <class T, int J, int I>
inline void products(const T* delta, const T* in, int64_t in_pitch, int64_t rows, T* gradient, int64_t sj) {
  constexpr int L = Lanes<T>::N;
  Vec<T> sum[J][I];
  for (int j = 0; j < J; ++j)
    for (int i = 0; i < I; ++i) sum[j][i] = all(T(0));
  for (int64_t r = 0; r < rows; r += L) {
    Vec<T> d[J];
    for (int j = 0; j < J; ++j) d[j] = *(const Vec<T>*)(delta + j * PITCH + r);
    for (int i = 0; i < I; ++i) {
      Vec<T> v = *(const Vec<T>*)(in + i * in_pitch + r);
      HOLD(v);
      for (int j = 0; j < J; ++j) sum[j][i] += d[j] * v;
    }
  }
  for (int j = 0; j < J; ++j)
    for (int i = 0; i < I; ++i) gradient[j * sj + i] += total<T>(sum[j][i]);
}

template <class T, int J>
inline void products_of(const T* delta, const T* in, int64_t in_pitch, int64_t inner, int64_t rows, T* gradient, int64_t sj) {
  constexpr int WIDE = J == 1 ? 2 * SIDE : SIDE;  // as many sums at once as hide the time that one addition takes
  int64_t i = 0;
  for (; i + WIDE <= inner; i += WIDE) products<T, J, WIDE>(delta, in + i * in_pitch, in_pitch, rows, gradient + i, sj);
  for (; i < inner; ++i) products<T, J, 1>(delta, in + i * in_pitch, in_pitch, rows, gradient + i, sj);
}

template <class T>
void outer_product(const T* delta, int64_t outer, const T* in, int64_t in_pitch, int64_t inner, int64_t rows, T* gradient) {
  int64_t j = 0;
#define PRODUCTS(J)                                                                                                          \
  for (; j + J <= outer; j += J) products_of<T, J>(delta + j * PITCH, in, in_pitch, inner, rows, gradient + j * inner, inner)
  PRODUCTS(4);
  PRODUCTS(2);
  PRODUCTS(1);
#undef PRODUCTS
}

// gradient[j] += sum_r delta[j][r] for J of them.
template <class T, int J> inline void row_sums(const T* delta, int64_t rows, T* gradient) {
  Vec<T> sum[J];
  for (int j = 0; j < J; ++j) sum[j] = all(T(0));
  for (int64_t r = 0; r < rows; r += Lanes<T>::N)
    for (int j = 0; j < J; ++j) sum[j] += *(const Vec<T>*)(delta + j * PITCH + r);
  for (int j = 0; j < J; ++j) gradient[j] += total<T>(sum[j]);
}

// -- one tile of rows ---------------------------------------------------------------------------------------------------------
template <class T> class Workspace {
 public:
  Workspace(const Network& net) : net(net), values(new T*[net.layers]), slopes(new T*[net.layers]) {
    int64_t widest = 1, size = net.inputs[0];
    for (int64_t l = 0; l < net.layers; ++l) {
      widest = net.outputs[l] > widest ? net.outputs[l] : widest;
      size += 2 * net.outputs[l];
    }
    memory = static_cast<T*>(std::aligned_alloc(64, (size + 2 * widest) * PITCH * sizeof(T)));
    if (!memory) throw std::bad_alloc();
    T* at = memory;
    for (int64_t l = 0; l < net.layers; ++l) {
      values[l] = at, at += net.outputs[l] * PITCH;
      slopes[l] = at, at += net.outputs[l] * PITCH;
    }
    delta[0] = at, delta[1] = at + widest * PITCH, shown = at + 2 * widest * PITCH;
  }
  ~Workspace() {
    std::free(memory);
    delete[] values;
    delete[] slopes;
  }
  Workspace(const Workspace&) = delete;

  // Outputs of the network for a tile, in values[last]; those before layer `from` are there already.
  void forward(const T* x, int64_t x_pitch, const T* theta, int64_t rows, bool back, int64_t from = 0) {
    const T* in = from ? values[from - 1] : x;
    int64_t pitch = from ? PITCH : x_pitch;
    for (int64_t l = from; l < net.layers; ++l) {
      const T* bias = net.bias[l] < 0 ? nullptr : theta + net.bias[l];
      affine<T>(theta + net.weight[l], net.inputs[l], 1, bias, in, pitch, net.inputs[l], net.outputs[l], rows, values[l],
                back ? slopes[l] : nullptr, net.activation[l], nullptr);
      in = values[l], pitch = PITCH;
      if (masked(l + 1)) dropped(l + 1, values[l], PITCH, rows, values[l], slopes[l]);
    }
  }

  // Those outputs by rows.
  void store(int64_t rows, T* out) const {
    const int64_t K = net.outputs[net.layers - 1];
    const T* last = values[net.layers - 1];
    if (K == 1) std::memcpy(out, last, rows * sizeof(T));
    for (int64_t r = 0; r < rows && K > 1; ++r)
      for (int64_t k = 0; k < K; ++k) out[r * K + k] = last[k * PITCH + r];
  }

  // Adds the gradient of the tile's log likelihood to `gradient`, and returns its value where wanted.
  double evaluate(const Rows& data, const T* theta, int64_t first, int64_t rows, bool value, T* gradient) {
    const T* x = static_cast<const T*>(data.x) + first;
    int64_t pitch = data.padded;
    this->first = first;
    if (masked(0)) {
      dropped(0, x, pitch, rows, shown, nullptr);
      x = shown, pitch = PITCH;
    }
    forward(x, pitch, theta, rows, true);
    const int64_t last = net.layers - 1;
    T* step = values[last];
    const double sum = likelihood<T>(data, theta, step, first, rows, value, gradient);
    if (net.activation[last] != NONE)
      for (int64_t k = 0; k < net.outputs[last] * PITCH; ++k) step[k] *= slopes[last][k];
    for (int64_t l = last; l >= 0; --l) {
      outer_product<T>(step, net.outputs[l], l ? values[l - 1] : x, l ? PITCH : pitch, net.inputs[l], rows,
                       gradient + net.weight[l]);
      if (net.bias[l] >= 0) {
        T* bias = gradient + net.bias[l];
        int64_t j = 0;
        for (; j + 8 <= net.outputs[l]; j += 8) row_sums<T, 8>(step + j * PITCH, rows, bias + j);
        for (; j < net.outputs[l]; ++j) row_sums<T, 1>(step + j * PITCH, rows, bias + j);
      }
      if (l) {
        T* next = delta[l % 2];
        const T* times = net.activation[l - 1] == NONE && !masked(l) ? nullptr : slopes[l - 1];
        affine<T>(theta + net.weight[l], 1, net.inputs[l], nullptr, step, PITCH, net.outputs[l], net.inputs[l], rows, next,
                  nullptr, NONE, times);
        step = next;
      }
    }
    return sum;
  }

  const Network& net;
  const Masks<T>* masks = nullptr;  // of the inputs of its layers, in `evaluate`
  T **values, **slopes;
  T *delta[2], *shown;
  T* memory;

 private:
  bool masked(int64_t l) const { return masks && l < net.layers && masks->uniform[l]; }
  void dropped(int64_t l, const T* from, int64_t pitch, int64_t rows, T* to, T* slope) {
    drop<T>(masks->uniform[l] + first, masks->padded, masks->rate[l], net.inputs[l], rows, from, pitch, to, slope,
            l == 0 || net.activation[l - 1] == NONE);
  }
  int64_t first = 0;
};

inline int64_t tile_rows(int64_t padded) {
  const int64_t tiles = (padded + TILE - 1) / TILE, even = (padded + tiles - 1) / tiles;
  return (even + GRAIN - 1) / GRAIN * GRAIN;
}

// -- the density of one chain ---------------------------------------------------------------------------------------------------
// One thread takes the tiles in turn, or several share them out; sums are in the order of the tiles either way.
template <class T> class Chain {
 public:
  Chain(const Network& net, const Rows& data, const Prior& prior, Team* team)
      : net(net), data(data), prior(prior), team(team), length(tile_rows(data.padded)) {
    tiles = (data.padded + length - 1) / length;
    if (tiles == 1 || (team && team->size() == 1)) this->team = nullptr;
    const int crew = this->team ? this->team->size() : 1;
    for (int t = 0; t < crew; ++t) spaces.emplace_back(new Workspace<T>(net));
    if (this->team) partial.resize(tiles * net.dim);
    sums.resize(tiles);
  }
  Chain(const Chain&) = delete;

  double evaluate(const T* theta, T* gradient, bool value, const Masks<T>* masks = nullptr) {
    for (auto& space : spaces) space->masks = masks;
    std::memset(gradient, 0, net.dim * sizeof(T));
    if (!team) {
      for (int64_t t = 0; t < tiles; ++t) sums[t] = tile(0, t, theta, value, gradient);
    } else {
      team->each(tiles, [&](int me, int64_t t) {
        T* own = partial.data() + t * net.dim;
        std::memset(own, 0, net.dim * sizeof(T));
        sums[t] = tile(me, t, theta, value, own);
      });
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t d = 0; d < net.dim; ++d) gradient[d] += partial[t * net.dim + d];
    }
    const T *loc = static_cast<const T*>(prior.loc), *precision = static_cast<const T*>(prior.precision);
    for (int64_t d = 0; d < net.dim; ++d) gradient[d] -= (theta[d] - loc[d]) * precision[d];
    double sum = 0;
    for (int64_t t = 0; t < tiles; ++t) sum += sums[t];
    return sum;
  }

  void trajectory(T* theta, T* momentum, T* gradient, double* log_likelihood, T size, const T* inverse_mass, int64_t steps,
                  int64_t drifts, const double* kick, const double* drift) {
    const int64_t D = net.dim;
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t k = 0; k < drifts; ++k) {
        const T push = T(kick[k]) * size, move = T(drift[k]) * size;
        if (k == 0)
          for (int64_t d = 0; d < D; ++d) momentum[d] += push * gradient[d];
        if (inverse_mass)
          for (int64_t d = 0; d < D; ++d) theta[d] += move * (momentum[d] * inverse_mass[d]);
        else
          for (int64_t d = 0; d < D; ++d) theta[d] += move * momentum[d];
        const bool value = s + 1 == steps && k + 1 == drifts;
        const double sum = evaluate(theta, gradient, value);
        if (value) *log_likelihood = sum;
        const T after = T(kick[k + 1]) * size;
        for (int64_t d = 0; d < D; ++d) momentum[d] += after * gradient[d];
      }
    }
  }

 private:
  double tile(int me, int64_t t, const T* theta, bool value, T* gradient) {
    const int64_t first = t * length, rows = data.padded - first < length ? data.padded - first : length;
    return spaces[me]->evaluate(data, theta, first, rows, value, gradient);
  }
  const Network& net;
  const Rows& data;
  const Prior& prior;
  Team* team;
  int64_t length, tiles;
  std::vector<std::unique_ptr<Workspace<T>>> spaces;
  std::vector<T> partial;
  std::vector<double> sums;
};

// Calls work(chain's density, number) for all chains: a thread for each of them, or all threads for one after another.
template <class T, class Work>
int64_t for_chains(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, Work work) try {
  Team team(threads);
  const bool apart = chains >= team.size();
  std::vector<std::unique_ptr<Chain<T>>> densities;
  for (int g = 0; g < (apart ? team.size() : 1); ++g) densities.emplace_back(new Chain<T>(net, data, prior, apart ? nullptr : &team));
  if (apart)
    team.each(chains, [&](int me, int64_t c) { work(*densities[me], c); });
  else
    for (int64_t c = 0; c < chains; ++c) work(*densities[0], c);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

template <class T>
int64_t trajectories(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, T* theta, T* momentum,
                     T* gradient, double* log_likelihood, const T* size, const T* inverse_mass, const int64_t* steps, int64_t drifts,
                     const double* kick, const double* drift) {
  return for_chains<T>(net, data, prior, chains, threads, [&](Chain<T>& density, int64_t c) {
    density.trajectory(theta + c * net.dim, momentum + c * net.dim, gradient + c * net.dim, log_likelihood + c, size[c], inverse_mass,
                       steps[c], drifts, kick, drift);
  });
}

template <class T>
int64_t evaluations(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, const T* theta,
                    T* gradient, double* log_likelihood) {
  return for_chains<T>(net, data, prior, chains, threads, [&](Chain<T>& density, int64_t c) {
    log_likelihood[c] = density.evaluate(theta + c * net.dim, gradient + c * net.dim, true);
  });
}

// -- steps on minibatches -------------------------------------------------------------------------------------------------------
struct Steps {
  int64_t count, friction;     // whether there is a momentum: SGHMC, else SGLD
  const int64_t* rows;         // [step][chain][batch], or null for all rows in each
  int64_t batch;
  double scale;                // of a batch's likelihood to that of all rows
  const void* noise;           // [chain][step][dim], with so many numbers from one chain to the next
  int64_t noise_pitch;
  const double* figures;       // [step][4]: step size, heat, share of the momentum that is kept, unused
};

// A minibatch in columns of its own, and the density of one chain on it; all rows where there is none.
template <class T> class Batch {
 public:
  Batch(const Network& net, const Rows& data, const Prior& prior, bool some, int64_t size, double weight)
      : net(net), data(data), size(size), own(data) {
    own.weight = weight;
    targets = data.kind == CATEGORICAL ? 1 : data.targets;
    if (some) {
      const int64_t wide = (size + GRAIN - 1) / GRAIN * GRAIN;
      columns.assign((net.inputs[0] + targets) * wide + 64 / sizeof(T), T(0));
      T* aligned = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(columns.data()) + 63) / 64 * 64);
      own.count = size, own.padded = wide;
      own.x = x = aligned, own.y = y = aligned + net.inputs[0] * wide;
    }
    density.reset(new Chain<T>(net, own, prior, nullptr));
  }

  // The gradient of the log density, and the log likelihood of these rows where it is wanted.
  double evaluate(const T* theta, T* gradient, const int64_t* rows, bool value, const Masks<T>* masks = nullptr) {
    if (rows) {
      take(static_cast<const T*>(data.x), net.inputs[0], x, rows);
      take(static_cast<const T*>(data.y), targets, y, rows);
    }
    return density->evaluate(theta, gradient, value, masks);
  }
  int64_t padded() const { return own.padded; }

  const Network& net;

 private:
  void take(const T* from, int64_t count, T* to, const int64_t* rows) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < size; ++r) to[i * own.padded + r] = from[i * data.padded + rows[r]];
  }
  const Rows& data;
  int64_t size, targets;
  Rows own;
  std::vector<T> columns;
  T *x = nullptr, *y = nullptr;
  std::unique_ptr<Chain<T>> density;
};

template <class T>
void diffuse(Batch<T>& batch, const Steps& plan, int64_t D, int64_t chain, int64_t chains, T* theta, T* momentum, T* gradient,
             double* value) {
  for (int64_t k = 0; k < plan.count; ++k) {
    const double *figure = plan.figures + 4 * k, size = figure[0], kept = figure[2];
    const int64_t* rows = plan.rows ? plan.rows + (k * chains + chain) * plan.batch : nullptr;
    const T* noise = static_cast<const T*>(plan.noise) + chain * plan.noise_pitch + k * D;
    const T half = T(0.5 * size);
    const bool last = k + 1 == plan.count;
    double sum;
    if (plan.friction) {
      const T hold = T(kept), spread = T(std::sqrt(1 - kept * kept) * figure[1]);
      for (int64_t d = 0; d < D; ++d) {
        T m = momentum[d] + half * gradient[d];
        theta[d] += half * m;
        m = hold * m + spread * noise[d];
        theta[d] += half * m;
        momentum[d] = m;
      }
      sum = batch.evaluate(theta, gradient, rows, last);
      for (int64_t d = 0; d < D; ++d) momentum[d] += half * gradient[d];
    } else {
      const T spread = T(std::sqrt(size) * figure[1]);
      sum = batch.evaluate(theta, gradient, rows, last);
      for (int64_t d = 0; d < D; ++d) theta[d] += half * gradient[d] + spread * noise[d];
    }
    if (last) *value = sum * (rows ? plan.scale : 1.0);
  }
}

// SGLD has a gradient of its own for every thread, and no momentum.
template <class T>
int64_t minibatch_steps(const Network& net, const Rows& data, const Prior& prior, int64_t chains, int64_t threads, const Steps& plan,
                        T* theta, T* momentum, T* gradient, double* value) try {
  Team team(chains < threads ? chains : threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  std::vector<std::vector<T>> slopes(team.size(), std::vector<T>(plan.friction ? 0 : net.dim));
  const double weight = data.weight * (plan.rows ? plan.scale : 1.0);
  for (int g = 0; g < team.size(); ++g) batches.emplace_back(new Batch<T>(net, data, prior, plan.rows, plan.batch, weight));
  team.each(chains, [&](int me, int64_t c) {
    diffuse<T>(*batches[me], plan, net.dim, c, chains, theta + c * net.dim, plan.friction ? momentum + c * net.dim : nullptr,
               plan.friction ? gradient + c * net.dim : slopes[me].data(), value + c);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- training ---------------------------------------------------------------------------------------------------------------------
struct Training {
  int64_t count, batch;
  const int64_t* rows;         // or null for all rows in each step
  int64_t step_pitch, member_pitch;  // from the rows of one step, and of one member, to the next
  const double* figures;       // [step][figure_pitch]: learning rate, the two corrections of Adam, number of the step
  int64_t figure_pitch, adam;  // or gradient descent with a momentum
  double first, second, tiny;  // the decays, and what is added to the root
  double clip;                 // largest norm of a gradient; 0 for any
  double weight, constant;     // of a row's likelihood in the loss; of the prior's part of it
  const void* const* uniform;  // of each layer [step][input][padded row], or null where nothing is dropped; null without dropout
  const void *rates, *precision;  // with dropout [member][layer], and the prior's precision [member][dim] in place of the other
  int64_t fixed;               // with dropout: parameters from here on stay as they are
};

// Minimises -weight * log likelihood + prior part of one member. `first_bad` gets the number of the first step whose loss is not finite.
template <class T>
void descend(Batch<T>& batch, const Prior& prior, const Training& plan, int64_t D, int64_t member, double active, T* theta, T* m, T* v,
             T* gradient, T* parts, double* first_bad) {
  const T *loc = static_cast<const T*>(prior.loc), *precision = static_cast<const T*>(prior.precision);
  const int64_t layers = batch.net.layers;
  std::vector<const T*> uniform(layers);
  Masks<T> masks = {uniform.data(), nullptr, batch.padded()};
  if (plan.uniform) precision = static_cast<const T*>(plan.precision) + member * D, masks.rate = static_cast<const T*>(plan.rates) + member * layers;
  for (int64_t k = 0; k < plan.count; ++k) {
    const double* figure = plan.figures + k * plan.figure_pitch;
    for (int64_t l = 0; l < layers && plan.uniform; ++l) {
      const T* all = static_cast<const T*>(plan.uniform[l]);
      uniform[l] = all ? all + k * batch.net.inputs[l] * batch.padded() : nullptr;
    }
    const int64_t* rows = plan.rows ? plan.rows + k * plan.step_pitch + member * plan.member_pitch : nullptr;
    double misfit = -plan.weight * batch.evaluate(theta, gradient, rows, true, plan.uniform ? &masks : nullptr), complexity = 0;
    if (plan.uniform) {
      for (int64_t d = 0; d < D; ++d) gradient[d] -= (theta[d] - loc[d]) * precision[d];
      for (int64_t d = plan.fixed; d < D; ++d) gradient[d] = 0;
    }
    double squares[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t d = 0; d < D; ++d) squares[d % 8] += double(precision[d]) * (double(theta[d]) - loc[d]) * (double(theta[d]) - loc[d]);
    for (double one : squares) complexity += 0.5 * one;
    complexity += plan.constant;
    T factor = T(-1);  // the gradient is of the log density
    if (plan.clip > 0) {
      double norm = 0;
      for (int64_t d = 0; d < D; ++d) norm += double(gradient[d]) * gradient[d];
      norm = std::sqrt(norm);
      if (norm > plan.clip) factor = T(-plan.clip / norm);
    }
    const T rate = T(figure[0] * active), one = T(figure[1]), two = T(figure[2]);
    const T b1 = T(plan.first), b2 = T(plan.second), r1 = T(1 - plan.first), r2 = T(1 - plan.second), tiny = T(plan.tiny);
    if (plan.adam)
      for (int64_t d = 0; d < D; ++d) {
        const T g = factor * gradient[d];
        m[d] = b1 * m[d] + r1 * g;
        v[d] = b2 * v[d] + r2 * (g * g);
        theta[d] -= rate * (m[d] * one) / (std::sqrt(v[d]) * two + tiny);
      }
    else
      for (int64_t d = 0; d < D; ++d) {
        m[d] = b1 * m[d] + factor * gradient[d];
        theta[d] -= rate * m[d];
      }
    parts[0] = T(misfit), parts[1] = T(complexity);
    if (!std::isfinite(misfit + complexity) && figure[3] < *first_bad) *first_bad = figure[3];
  }
}

template <class T>
int64_t training_steps(const Network& net, const Rows& data, const Prior& prior, int64_t members, int64_t threads, const Training& plan,
                       const T* active, T* theta, T* m, T* v, T* parts, double* first_bad) try {
  Team team(members < threads ? members : threads);
  std::vector<std::unique_ptr<Batch<T>>> batches;
  std::vector<std::vector<T>> slopes(team.size(), std::vector<T>(net.dim));
  for (int g = 0; g < team.size(); ++g) batches.emplace_back(new Batch<T>(net, data, prior, plan.rows, plan.batch, plan.weight));
  team.each(members, [&](int me, int64_t c) {
    descend<T>(*batches[me], prior, plan, net.dim, c, active[c], theta + c * net.dim, m + c * net.dim, v ? v + c * net.dim : nullptr,
               slopes[me].data(), parts + 2 * c, first_bad + c);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// out[chain][row][output] for rows that lie as in Rows; `pitch` is from one parameter vector to the next.
template <class T>
int64_t outputs(const Network& net, const T* x, int64_t count, int64_t padded, int64_t chains, int64_t threads, const T* theta,
                int64_t pitch, T* out) try {
  const int64_t length = tile_rows(padded), tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  Team team(threads);
  std::vector<std::unique_ptr<Workspace<T>>> spaces;
  for (int g = 0; g < team.size(); ++g) spaces.emplace_back(new Workspace<T>(net));
  team.each(chains * tiles, [&](int me, int64_t job) {
    const int64_t c = job / tiles, first = job % tiles * length, rows = padded - first < length ? padded - first : length;
    spaces[me]->forward(x + first, padded, theta + c * pitch, rows, false);
    spaces[me]->store(count - first < rows ? count - first : rows, out + (c * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// -- passes with dropout ------------------------------------------------------------------------------------------------------------
// All passes of a tile see the same rows: the first layer's sums without a mask are there once, and a pass takes away what it drops.
template <class T> class Passes {
 public:
  Passes(const Network& net) : net(net), plain(net), space(net), theta(net.dim), changes(net.inputs[0]), places(net.inputs[0]) {}

  void begin(const T* x, int64_t pitch, const T* given, int64_t rows) {
    this->x = x, this->pitch = pitch, this->given = given, this->rows = rows;
    affine<T>(given + net.weight[0], net.inputs[0], 1, nullptr, x, pitch, net.inputs[0], net.outputs[0], rows, plain.values[0], nullptr,
              NONE, nullptr);
  }

  // Outputs of one pass, in the workspace; masks[layer] + at is the mask of its inputs, or masks[layer] null.
  Workspace<T>& pass(const T* const* masks, int64_t at) {
    std::memcpy(theta.data(), given, net.dim * sizeof(T));
    const int64_t inputs = net.inputs[0];
    T most = masks[0] ? T(0) : T(1);
    for (int64_t i = 0; i < inputs && masks[0]; ++i) most = masks[0][at + i] > most ? masks[0][at + i] : most;
    int64_t count = 0;
    for (int64_t i = 0; i < inputs && masks[0]; ++i)
      if (masks[0][at + i] != most) places[count] = i, changes[count++] = masks[0][at + i] - most;
    const bool few = 2 * count < inputs;
    if (few) first_layer(most, count);
    for (int64_t l = few ? 1 : 0; l < net.layers; ++l) {  // a mask of a layer's inputs is one of the columns of its weight
      T* w = theta.data() + net.weight[l];
      for (int64_t j = 0; j < net.outputs[l] && masks[l]; ++j, w += net.inputs[l])
        for (int64_t i = 0; i < net.inputs[l]; ++i) w[i] *= masks[l][at + i];
    }
    space.forward(x, pitch, theta.data(), rows, false, few ? 1 : 0);
    return space;
  }

 private:
  // All that a loop needs is in its own variables: numbers that are written could be any of the members.
  void first_layer(T most, int64_t count) {
    constexpr int L = Lanes<T>::N;
    const int64_t inputs = net.inputs[0], rows = this->rows, pitch = this->pitch, act = net.activation[0], *places = this->places.data();
    const T *x = this->x, *w = given + net.weight[0], *bias = net.bias[0] < 0 ? nullptr : given + net.bias[0];
    T* change = theta.data() + net.weight[0];  // ours to write on: the forward pass begins after it
    for (int64_t j = 0; j < net.outputs[0]; ++j) {
      const T *from = plain.values[0] + j * PITCH, start = bias ? bias[j] : T(0);
      T* to = space.values[0] + j * PITCH;
      for (int64_t k = 0; k < count; ++k) change[k] = w[j * inputs + places[k]] * changes[k];
      for (int64_t r = 0; r < rows; r += 2 * L) {
        Vec<T> one = start + most * *(const Vec<T>*)(from + r), two = start + most * *(const Vec<T>*)(from + r + L);
        for (int64_t k = 0; k < count; ++k) {
          const T* column = x + places[k] * pitch + r;
          one += change[k] * *(const Vec<T>*)column;
          two += change[k] * *(const Vec<T>*)(column + L);
        }
        *(Vec<T>*)(to + r) = activated<T>(act, one);
        *(Vec<T>*)(to + r + L) = activated<T>(act, two);
      }
    }
  }
  const Network& net;
  Workspace<T> plain, space;
  std::vector<T> theta, changes;
  std::vector<int64_t> places;
  const T *x = nullptr, *given = nullptr;
  int64_t pitch = 0, rows = 0;
};

// out[pass][row][output]; masks are `pitch` apart from one pass to the next.
template <class T>
int64_t passes(const Network& net, const T* x, int64_t count, int64_t padded, int64_t passes, int64_t threads, const T* theta,
               const T* const* masks, int64_t pitch, T* out) try {
  const int64_t length = tile_rows(padded), tiles = (padded + length - 1) / length, K = net.outputs[net.layers - 1];
  Team team(threads);
  const int64_t parts = tiles < team.size() ? team.size() : 1;  // of the passes, where there are fewer tiles than threads
  std::vector<std::unique_ptr<Passes<T>>> own;
  for (int g = 0; g < team.size(); ++g) own.emplace_back(new Passes<T>(net));
  team.each(tiles * parts, [&](int me, int64_t job) {
    const int64_t part = job % parts, first = job / parts * length, rows = padded - first < length ? padded - first : length;
    own[me]->begin(x + first, padded, theta, rows);
    for (int64_t p = part * passes / parts; p < (part + 1) * passes / parts; ++p)
      own[me]->pass(masks, p * pitch).store(count - first < rows ? count - first : rows, out + (p * count + first) * K);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                                    \
  extern "C" int64_t trajectories_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,          \
                                           int64_t threads, T* theta, T* momentum, T* gradient, double* log_likelihood,       \
                                           const T* size, const T* inverse_mass, const int64_t* steps, int64_t drifts,        \
                                           const double* kick, const double* drift) {                                         \
    return trajectories<T>(*net, *data, *prior, chains, threads, theta, momentum, gradient, log_likelihood, size,             \
                           inverse_mass, steps, drifts, kick, drift);                                                         \
  }                                                                                                                          \
  extern "C" int64_t evaluations_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,           \
                                          int64_t threads, const T* theta, T* gradient, double* log_likelihood) {             \
    return evaluations<T>(*net, *data, *prior, chains, threads, theta, gradient, log_likelihood);                             \
  }                                                                                                                          \
  extern "C" int64_t minibatch_steps_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t chains,       \
                                              int64_t threads, const Steps* plan, T* theta, T* momentum, T* gradient,         \
                                              double* value) {                                                                \
    return minibatch_steps<T>(*net, *data, *prior, chains, threads, *plan, theta, momentum, gradient, value);                 \
  }                                                                                                                          \
  extern "C" int64_t training_steps_##SUFFIX(const Network* net, const Rows* data, const Prior* prior, int64_t members,       \
                                             int64_t threads, const Training* plan, const T* active, T* theta, T* m, T* v,    \
                                             T* parts, double* first_bad) {                                                   \
    return training_steps<T>(*net, *data, *prior, members, threads, *plan, active, theta, m, v, parts, first_bad);            \
  }                                                                                                                          \
  extern "C" int64_t outputs_##SUFFIX(const Network* net, const T* x, int64_t count, int64_t padded, int64_t chains,          \
                                      int64_t threads, const T* theta, int64_t pitch, T* out) {                               \
    return outputs<T>(*net, x, count, padded, chains, threads, theta, pitch, out);                                            \
  }                                                                                                                          \
  extern "C" int64_t passes_##SUFFIX(const Network* net, const T* x, int64_t count, int64_t padded, int64_t count_passes,     \
                                     int64_t threads, const T* theta, const T* const* masks, int64_t pitch, T* out) {         \
    return passes<T>(*net, x, count, padded, count_passes, threads, theta, masks, pitch, out);                                \
  }
EXPORT(float, f32)
EXPORT(double, f64)
