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

// sums[t][r] = x[t] . w[r], in every lane. All 32 lanes must call it.
template <typename T, int kLines, int kRows, bool kVector>
__device__ inline void dot_tile(const T* const (&x)[kLines], const T* const (&w)[kRows], int64_t k, float (&sums)[kLines][kRows]) {
  constexpr int kAhead = kRows == 1 ? 4 : kLines < 8 ? 2 : 1;  // packs of each row in flight, as registers allow
  constexpr int64_t kStep = kWarpSize * kPack;
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = 0.0f;
  }
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarpSize) * kPack;
  for (int64_t at = first; at < k; at += kAhead * kStep) {
    Pack<T> packs[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) packs[a][r] = load_pack<kVector>(w[r] + at + a * kStep, k - (at + a * kStep));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < k) add_products<T, kLines, kRows, kVector>(x, packs[a], at + a * kStep, k - (at + a * kStep), sums);
    }
  }
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[t][r] = warp_sum(sums[t][r]);
  }
}

// Where a warp of a linear works. Blocks that share weight rows are neighbours, so that the rows come out of L2 after the first of them.
struct TilePlace {
  int64_t first_line, first_row;
};

template <int kLines, int kRows, int kWarps>
__device__ inline TilePlace tile_place(int64_t line_tiles) {
  const int64_t row_block = blockIdx.x / line_tiles, line_tile = blockIdx.x % line_tiles;
  return {line_tile * kLines, (row_block * kWarps + threadIdx.x / kWarpSize) * kRows};
}

// Pointers to the tile's lines. A tile that reaches past the last active line repeats its first one; the caller drops those results.
template <typename T, int kLines>
__device__ inline void tile_lines(const T* x, int64_t stride, int64_t first_line, int64_t lines, const T* (&out)[kLines]) {
#pragma unroll
  for (int t = 0; t < kLines; ++t) out[t] = x + (first_line + t < lines ? first_line + t : first_line) * stride;
}

}  // namespace photon::cuda
