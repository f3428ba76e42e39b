// The feed-forward part: silu_mul alone, and fused_mlp (gate, up and silu_mul in one pass over the weights, then down).
#include "cuda/dot.cuh"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const SiluMulParams p, int64_t packs) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t line = index / packs, d = index % packs * kPack;
  if (line >= p.lines) return;
  const T* gates = static_cast<const T*>(p.gate_up) + line * p.gate_up_stride + d;
  Pack<T> gate = load_pack<kVector>(gates, p.width - d);
  const Pack<T> up = load_pack<kVector>(gates + p.width, p.width - d);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gate.e[i] = silu_times<T>(to_float(gate.e[i]), to_float(up.e[i]));
  store_pack<kVector>(static_cast<T*>(p.out) + line * p.out_stride + d, gate, p.width - d);
}

// act = silu(x W_gate^T) * (x W_up^T), with the roundings of linear and silu_mul: the same bits as those two ops.
template <typename T, int kLines, bool kVector>
__global__ void __launch_bounds__(kThreads) gate_up_kernel(const FusedMlpParams p, int64_t line_tiles) {
  const int64_t lines = active_lines(p.extent, p.lines);
  const TilePlace at = tile_place<kLines, 1, kWarps>(line_tiles);
  if (at.first_line >= lines || at.first_row >= p.intermediate) return;

  const T* x[kLines];
  tile_lines<T, kLines>(static_cast<const T*>(p.x), p.x_stride, at.first_line, lines, x);
  const T* weight = static_cast<const T*>(p.gate_up_weight);
  const T* const w[2] = {weight + at.first_row * p.hidden, weight + (p.intermediate + at.first_row) * p.hidden};
  float sums[kLines][2];
  dot_tile<T, kLines, 2, kVector>(x, w, p.hidden, sums);

  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
    const int64_t line = at.first_line + t;
    if (lane != t || line >= lines) continue;
    static_cast<T*>(p.act)[line * p.act_stride + at.first_row] = silu_times<T>(rounded<T>(sums[t][0]), rounded<T>(sums[t][1]));
  }
}

template <typename T, int kLines, bool kVector>
int launch_gate_up(const FusedMlpParams& p, void* stream) {
  const int64_t line_tiles = ceil_div(p.lines, kLines);
  return launch(gate_up_kernel<T, kLines, kVector>, ceil_div(p.intermediate, kWarps) * line_tiles, kThreads, stream, p, line_tiles);
}

int gate_up(const FusedMlpParams& p, void* stream) {
  const bool vectors =
      p.hidden % kPack == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.gate_up_weight) && are_whole_vectors(p.dtype, p.x_stride);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!vectors) return launch_gate_up<T, 4, false>(p, stream);
    if (p.lines == 1) return launch_gate_up<T, 1, true>(p, stream);
    if (p.lines == 2) return launch_gate_up<T, 2, true>(p, stream);
    if (p.lines <= 4) return launch_gate_up<T, 4, true>(p, stream);
    return launch_gate_up<T, 8, true>(p, stream);
  });
}

}  // namespace

int silu_mul(const SiluMulParams& p, void* stream) {
  if (p.lines == 0 || p.width == 0) return 0;
  const bool vectors = p.width % kPack == 0 && is_vector_aligned(p.out) && is_vector_aligned(p.gate_up) &&
                       are_whole_vectors(p.dtype, p.out_stride, p.gate_up_stride);
  const int64_t packs = ceil_div(p.width, kPack), blocks = ceil_div(p.lines * packs, kThreads);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(vectors ? silu_mul_kernel<T, true> : silu_mul_kernel<T, false>, blocks, kThreads, stream, p, packs);
  });
}

int fused_mlp(const FusedMlpParams& p, void* stream) {
  if (p.lines == 0 || p.hidden == 0) return 0;
  if (p.intermediate > 0) {
    const int error = gate_up(p, stream);
    if (error != 0) return error;
  }
  LinearParams down = {};
  down.out = p.out;
  down.x = p.act;
  down.weight = p.down_weight;
  down.extent = p.extent;
  down.lines = p.lines;
  down.n = p.hidden;
  down.k = p.intermediate;
  down.out_stride = p.out_stride;
  down.x_stride = p.act_stride;
  down.weight_stride = p.intermediate;
  down.dtype = p.dtype;
  return linear(down, stream);
}

}  // namespace photon::cuda
