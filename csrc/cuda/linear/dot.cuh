// The dot products of a decode linear: one warp multiplies a few weight rows with a few tokens, so
// that a weight is read once for all of them. A lane takes every 32nd pack of eight along k and
// adds its products in that order into one accumulator per (token, row); a butterfly sums the
// lanes. Neither depends on how many tokens or rows share the warp: a token's result is the same
// alone and batched.
#pragma once
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// How many leading tokens to compute: all of them, or what the step says on the device.
__device__ inline int64_t active_tokens(const int32_t* counts, int64_t tokens) {
  if (counts == nullptr || *counts >= tokens) return tokens;
  return *counts > 0 ? *counts : 0;
}

// Adds one pack of every token times one pack of every row.
template <typename T, int kTokens, int kRows, bool kVector>
__device__ inline void add_products(const T* const (&x)[kTokens], const Pack<T> (&w)[kRows],
                                    int64_t at, int64_t count, float (&sums)[kTokens][kRows]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const Pack<T> xs = load_pack<kVector>(x[t] + at, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        sums[t][r] = fmaf(to_float(xs.e[i]), to_float(w[r].e[i]), sums[t][r]);
    }
  }
}

template <int kTokens, int kRows>
__device__ inline void clear_sums(float (&sums)[kTokens][kRows]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = 0.0f;
  }
}

// sums[t][r] += the lane's share of x[t] . w[r], over `count` elements. A longer product may be
// added piece by piece: where every piece but the last is a multiple of kDotStep long, a lane adds
// the same products in the same order.
constexpr int64_t kDotStep = kWarpSize * kPack;

template <typename T, int kTokens, int kRows, bool kVector>
__device__ inline void add_dots(const T* const (&x)[kTokens], const T* const (&w)[kRows],
                                int64_t count, float (&sums)[kTokens][kRows]) {
  constexpr int kAhead = kRows == 1    ? 4
                         : kTokens < 8 ? 2
                                       : 1;  // packs of each row in flight, as registers allow
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarpSize) * kPack;
  for (int64_t at = first; at < count; at += kAhead * kDotStep) {
    Pack<T> packs[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        packs[a][r] = load_pack<kVector>(w[r] + at + a * kDotStep, count - (at + a * kDotStep));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t here = at + a * kDotStep;
      if (here < count)
        add_products<T, kTokens, kRows, kVector>(x, packs[a], here, count - here, sums);
    }
  }
}

// Every lane gets the sums over the lanes. All 32 lanes must call it.
template <int kTokens, int kRows>
__device__ inline void sum_lanes(float (&sums)[kTokens][kRows]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = warp_sum(sums[t][r]);
  }
}

}  // namespace photon::cuda
