// linear: out = x W^T + bias, for the few lines of a decode step. Memory bound there; right, but not fast, for long chunks.
#include "cuda/dot.cuh"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kManyRows = 8192;  // from here on one row a warp is more than the GPU holds at once: share x among four

template <typename T, int kLines, int kRows, bool kVector>
__global__ void __launch_bounds__(kThreads) linear_kernel(const LinearParams p, int64_t line_tiles) {
  const int64_t lines = active_lines(p.extent, p.lines);
  const TilePlace at = tile_place<kLines, kRows, kWarps>(line_tiles);
  if (at.first_line >= lines || at.first_row >= p.n) return;

  const T* x[kLines];
  const T* w[kRows];
  tile_lines<T, kLines>(static_cast<const T*>(p.x), p.x_stride, at.first_line, lines, x);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = at.first_row + r < p.n ? at.first_row + r : at.first_row;
    w[r] = static_cast<const T*>(p.weight) + row * p.weight_stride;
  }
  float sums[kLines][kRows];
  dot_tile<T, kLines, kRows, kVector>(x, w, p.k, sums);

  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t line = at.first_line + t, row = at.first_row + r;
      if (lane != t * kRows + r || line >= lines || row >= p.n) continue;
      const float bias = p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[row]) : 0.0f;
      static_cast<T*>(p.out)[line * p.out_stride + row] = from_float<T>(sums[t][r] + bias);
    }
  }
}

template <typename T, int kLines, int kRows, bool kVector>
int launch_tiles(const LinearParams& p, void* stream) {
  static_assert(kLines * kRows <= kWarpSize, "one lane writes one output");
  const int64_t line_tiles = ceil_div(p.lines, kLines);
  const int64_t blocks = ceil_div(p.n, kWarps * kRows) * line_tiles;
  return launch(linear_kernel<T, kLines, kRows, kVector>, blocks, kThreads, stream, p, line_tiles);
}

template <typename T, int kRows>
int launch_lines(const LinearParams& p, void* stream) {
  if (p.lines == 1) return launch_tiles<T, 1, kRows, true>(p, stream);
  if (p.lines == 2) return launch_tiles<T, 2, kRows, true>(p, stream);
  if (p.lines <= 4) return launch_tiles<T, 4, kRows, true>(p, stream);
  return launch_tiles<T, 8, kRows, true>(p, stream);
}

}  // namespace

int linear(const LinearParams& p, void* stream) {
  if (p.lines == 0 || p.n == 0) return 0;
  const bool vectors =
      p.k % kPack == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.weight) && are_whole_vectors(p.dtype, p.x_stride, p.weight_stride);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!vectors) return launch_tiles<T, 4, 1, false>(p, stream);
    return p.n >= kManyRows ? launch_lines<T, 4>(p, stream) : launch_lines<T, 1>(p, stream);
  });
}

}  // namespace photon::cuda
