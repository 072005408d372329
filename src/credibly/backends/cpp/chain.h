// The density of one chain on all rows, trajectories on it, and chains shared out over threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "masks.h"
#include "network.h"
#include "team.h"
#include "tile.h"

namespace {

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

}  // namespace
