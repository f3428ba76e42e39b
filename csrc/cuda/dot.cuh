// The dot products of a decode linear: one warp multiplies a few weight rows with a few lines, so that a weight is read once for all of
// them. A lane takes every 32nd pack of eight along k and adds its products in that order into one accumulator per (line, row); a
// butterfly sums the lanes. Neither depends on how many lines or rows share the warp: a line's result is the same alone and batched.
#pragma once
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// How many leading lines to compute: all of them, or what the step says on the device.
__device__ inline int64_t active_lines(const int32_t* extent, int64_t lines) {
  if (extent == nullptr || *extent >= lines) return lines;
  return *extent > 0 ? *extent : 0;
}

// Adds one pack of every line times one pack of every row.
template <typename T, int kLines, int kRows, bool kVector>
__device__ inline void add_products(const T* const (&x)[kLines], const Pack<T> (&w)[kRows], int64_t at, int64_t count,
                                    float (&sums)[kLines][kRows]) {
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
    const Pack<T> xs = load_pack<kVector>(x[t] + at, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[t][r] = fmaf(to_float(xs.e[i]), to_float(w[r].e[i]), sums[t][r]);
    }
  }
}

template <int kLines, int kRows>
__device__ inline void clear_sums(float (&sums)[kLines][kRows]) {
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = 0.0f;
  }
}

// sums[t][r] += the lane's share of x[t] . w[r], over `count` elements. A longer product may be added piece by piece: where every piece but
// the last is a multiple of kDotStep long, a lane adds the same products in the same order.
constexpr int64_t kDotStep = kWarpSize * kPack;

template <typename T, int kLines, int kRows, bool kVector>
__device__ inline void add_dots(const T* const (&x)[kLines], const T* const (&w)[kRows], int64_t count, float (&sums)[kLines][kRows]) {
  constexpr int kAhead = kRows == 1 ? 4 : kLines < 8 ? 2 : 1;  // packs of each row in flight, as registers allow
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarpSize) * kPack;
  for (int64_t at = first; at < count; at += kAhead * kDotStep) {
    Pack<T> packs[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) packs[a][r] = load_pack<kVector>(w[r] + at + a * kDotStep, count - (at + a * kDotStep));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t here = at + a * kDotStep;
      if (here < count) add_products<T, kLines, kRows, kVector>(x, packs[a], here, count - here, sums);
    }
  }
}

// Every lane gets the sums over the lanes. All 32 lanes must call it.
template <int kLines, int kRows>
__device__ inline void sum_lanes(float (&sums)[kLines][kRows]) {
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = warp_sum(sums[t][r]);
  }
}

}  // namespace photon::cuda
