// Counter-based standard normal numbers: each is a function of the two keys of its stream and of its index alone.
//
// Any thread can generate any of them, in registers and in any order. Word w of a stream is that of SplitMix64 after w
// steps from the first key, with the second key added halfway, so streams are not parts of one sequence. rng.py
// generates the same words.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"
#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 32;  // numbers from 16 words: eight give the radii, eight the angles

typedef uint64_t Words __attribute__((vector_size(BYTES), may_alias));
typedef Vec<float> Reals;
typedef Lanes<float>::I Ints;

inline Words random_words(const Keys& keys, uint64_t first) {
  constexpr uint64_t STEP = 0x9E3779B97F4A7C15;
  Words z = {};
  for (int k = 0; k < BYTES / 8; ++k) z[k] = uint64_t(k + 1) * STEP;
  z += keys.first + first * STEP;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 + keys.second;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// log(m 2^e) with m around 1, by a polynomial of degree 9 in m - 1.
inline Reals vlog(Reals x) {
  const Ints bits = (Ints)x, e = (bits - 0x3F3504F3) >> 23;
  const Reals f = (Reals)(bits - (e << 23)) - 1.0f, n = __builtin_convertvector(e, Reals), square = f * f;
  Reals p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return n * 0.693359375f + (f + (p * f * square - 0.5f * square - n * 2.12194440e-4f));
}

inline Reals vsqrt(Reals x) {
  Reals out;
  for (int k = 0; k < Lanes<float>::N; ++k) out[k] = std::sqrt(x[k]);
  return out;
}

// Sine and cosine of pi v for v in [-1, 1]: reduced by the nearest multiple of 1/2, polynomials of the remainder.
inline void vsincospi(Reals v, Reals& sine, Reals& cosine) {
  const Reals shifted = v * 2.0f + 12582912.0f, r = v - 0.5f * (shifted - 12582912.0f), square = r * r;
  const Ints quarter = (Ints)shifted;
  Reals s = square * 8.2145887e-2f - 5.9926453e-1f;
  s = s * square + 2.5501640f;
  s = s * square - 5.1677128f;
  s = (s * square + 3.1415927f) * r;
  Reals c = square * -2.5806891e-2f + 2.3533063e-1f;
  c = c * square - 1.3352628f;
  c = c * square + 4.0587121f;
  c = c * square - 4.9348022f;
  c = c * square + 1.0f;
  const Ints odd = (quarter & 1) == 1;
  const Reals s_part = odd ? c : s, c_part = odd ? s : c;
  sine = (Reals)((Ints)s_part ^ ((quarter & 2) << 30));
  cosine = (Reals)((Ints)c_part ^ (((quarter + 1) & 2) << 30));
}

// The numbers of one chunk by the Box-Muller transform; numbers k and k + 16 share a radius.
inline void normals(const Keys& keys, int64_t chunk, Reals* out) {
  constexpr int L = Lanes<float>::N, HALF = CHUNK / 2;
  for (int h = 0; h < HALF; h += L) {
    const Ints first = (Ints)random_words(keys, HALF * chunk + h / 2);
    const Ints second = (Ints)random_words(keys, HALF * chunk + HALF / 2 + h / 2);
    const Reals magnitude = (Reals)((Ints)__builtin_convertvector(first, Reals) & 0x7FFFFFFF);
    // |bits| / 2^31 is uniform with 31 bits, finest near zero, where the tails come from; 0 becomes 1/4.
    const Reals radius = vsqrt(-2.0f * vlog((magnitude < 0.25f ? broadcast(0.25f) : magnitude) * 0x1p-31f));
    Reals sine, cosine;
    vsincospi(__builtin_convertvector(second, Reals) * 0x1p-31f, sine, cosine);
    out[h / L] = radius * cosine;
    out[(HALF + h) / L] = radius * sine;
  }
}

}  // namespace
