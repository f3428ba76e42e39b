// The kernel of every linear, for the few lines of a decode step: a block multiplies a tile of lines, as they are or normalized first, with
// the weight rows of its warps, and finishes the products on the spot. A product has the same bits whichever of these ops computes it.
// Memory bound there; right, but not fast, for long chunks.
#pragma once
#include "cuda/dot.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/norm.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarpSize;
constexpr int64_t kManyRows = 8192;          // from here on one row a warp is more than the GPU holds at once: share x among four
constexpr int64_t kNormedBytes = 32 * 1024;  // of normalized lines in shared memory at once; longer lines come in pieces

// What becomes of the products.
enum class Finish {
  kStore,   // out = x W^T + bias
  kAdd,     // out += round(x W^T + bias)
  kSwiglu,  // out = silu(x G^T + bias) * (x U^T + bias), where the weight is G, then U
};

// Weight rows, n apart, that make one output.
template <Finish kFinish>
constexpr int kFactors = kFinish == Finish::kSwiglu ? 2 : 1;

struct TileParams {
  void* out;                // [lines, n]
  const void* x;            // [lines, k]
  const void* norm_weight;  // [k]; unread by kernels that do not normalize
  const void* weight;       // [kFactors * n, k]
  const void* bias;         // [kFactors * n] or null
  const int32_t* extent;    // [1] or null
  int64_t lines, n, k, out_stride, x_stride, weight_stride;
  float eps;
  DType dtype;
};

// Shared memory of a block that normalizes its lines: this, then the packs of a piece of each line, one line after the other.
template <int kLines>
struct alignas(16) NormShared {
  float partial[kLines][kWarpSize];  // sums of squares, one a warp of the norm's
  float scales[kLines];
};

// Packs of a line that are in shared memory at once. Pieces of whole steps leave the order of a sum as it is.
template <typename T, int kLines>
PHOTON_HOST_DEVICE inline int64_t piece_packs(int64_t k) {
  constexpr int64_t kMost = kNormedBytes / (kLines * sizeof(Pack<T>));
  static_assert(kMost * kPack % kDotStep == 0);
  const int64_t packs = (k + kPack - 1) / kPack;
  return packs < kMost ? packs : kMost;
}

// shared.scales[t] = what line t is multiplied with, for the `active` lines from x on. All threads of the block must call it.
template <typename T, int kLines, bool kVector>
__device__ inline void norm_scales(const TileParams& p, const T* x, int active, NormShared<kLines>& shared) {
  static_assert(kLines <= kTileWarps, "one warp adds up one line");
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int threads = norm_threads(p.k), warps = threads / kWarpSize;
  for (int i = warp; i < active * warps; i += kTileWarps) {
    const int t = i / warps, part = i % warps;
    const auto load = [&](int64_t d) { return load_pack<kVector>(x + t * p.x_stride + d, p.k - d); };
    const float squares = warp_sum(sum_squares(load, p.k, part * kWarpSize + lane, threads));
    if (lane == 0) shared.partial[t][part] = squares;
  }
  __syncthreads();
  if (warp < active) {
    const float squares = sum_partials(shared.partial[warp], warps);
    if (lane == 0) shared.scales[warp] = norm_scale(squares, p.k, p.eps);
  }
  __syncthreads();
}

// add_dots of the normalized lines, `active` of them from x on. All threads of the block must call it; a warp without rows only helps to
// normalize.
template <typename T, int kLines, int kRows, bool kVector>
__device__ inline void add_normed_dots(const TileParams& p, const T* x, int active, bool has_rows, const T* const (&w)[kRows],
                                       float (&sums)[kLines][kRows]) {
  auto& shared = *reinterpret_cast<NormShared<kLines>*>(dynamic_shared());
  Pack<T>* const normed = reinterpret_cast<Pack<T>*>(&shared + 1);
  const int line_packs = static_cast<int>(piece_packs<T, kLines>(p.k));
  norm_scales<T, kLines, kVector>(p, x, active, shared);
  const T* lines[kLines];
#pragma unroll
  for (int t = 0; t < kLines; ++t) lines[t] = normed[(t < active ? t : 0) * line_packs].e;

  const int64_t piece = static_cast<int64_t>(line_packs) * kPack;
  for (int64_t begin = 0; begin < p.k; begin += piece) {
    const int64_t count = p.k - begin < piece ? p.k - begin : piece;
    const int packs = static_cast<int>((count + kPack - 1) / kPack);
    if (begin > 0) __syncthreads();  // all have read the piece before
    for (int i = threadIdx.x; i < active * packs; i += kTileThreads) {
      const int t = i / packs, pack = i % packs;
      const int64_t d = begin + pack * kPack, rest = p.k - d;
      const Pack<T> raw = load_pack<kVector>(x + t * p.x_stride + d, rest);
      normed[t * line_packs + pack] = normalized<kVector>(raw, static_cast<const T*>(p.norm_weight) + d, rest, shared.scales[t]);
    }
    __syncthreads();
    if (!has_rows) continue;
    const T* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = w[r] + begin;
    add_dots<T, kLines, kRows, kVector>(lines, rows, count, sums);
  }
}

// Writes output `n` of a line from the sums of its weight rows.
template <Finish kFinish, typename T>
__device__ inline void finish(const TileParams& p, int64_t line, int64_t n, const float* sums) {
  float products[kFactors<kFinish>];
#pragma unroll
  for (int f = 0; f < kFactors<kFinish>; ++f) {
    products[f] = sums[f] + (p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[f * p.n + n]) : 0.0f);
  }
  T* out = static_cast<T*>(p.out) + line * p.out_stride + n;
  if constexpr (kFinish == Finish::kStore) *out = from_float<T>(products[0]);
  if constexpr (kFinish == Finish::kAdd) *out = from_float<T>(to_float(*out) + rounded<T>(products[0]));
  if constexpr (kFinish == Finish::kSwiglu) *out = silu_times<T>(rounded<T>(products[0]), rounded<T>(products[1]));
}

// Blocks that share weight rows are neighbours, so that the rows come out of L2 after the first of them. A tile that reaches past the last
// line or row repeats its first one, and drops those results.
template <Finish kFinish, bool kNorm, typename T, int kLines, int kOutputs, bool kVector>
__global__ void __launch_bounds__(kTileThreads) tile_kernel(const TileParams p, int64_t line_tiles) {
  constexpr int kRows = kOutputs * kFactors<kFinish>;
  const int64_t lines = active_lines(p.extent, p.lines);
  const int64_t first_line = blockIdx.x % line_tiles * kLines;
  const int64_t first = (blockIdx.x / line_tiles * kTileWarps + threadIdx.x / kWarpSize) * kOutputs;
  if (first_line >= lines || (!kNorm && first >= p.n)) return;

  const int active = static_cast<int>(lines - first_line < kLines ? lines - first_line : kLines);
  const T* x = static_cast<const T*>(p.x) + first_line * p.x_stride;
  const T* w[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t n = first + r / kFactors<kFinish>;
    w[r] = static_cast<const T*>(p.weight) + ((n < p.n ? n : first) + r % kFactors<kFinish> * p.n) * p.weight_stride;
  }
  float sums[kLines][kRows];
  clear_sums(sums);
  if constexpr (kNorm) {
    add_normed_dots<T, kLines, kRows, kVector>(p, x, active, first < p.n, w, sums);
    if (first >= p.n) return;
  } else {
    const T* tile[kLines];
#pragma unroll
    for (int t = 0; t < kLines; ++t) tile[t] = x + (t < active ? t : 0) * p.x_stride;
    add_dots<T, kLines, kRows, kVector>(tile, w, p.k, sums);
  }
  sum_lanes(sums);

  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int t = 0; t < kLines; ++t) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (lane != t * kOutputs + o || t >= active || first + o >= p.n) continue;
      finish<kFinish, T>(p, first_line + t, first + o, sums[t] + o * kFactors<kFinish>);
    }
  }
}

template <Finish kFinish, bool kNorm, typename T, int kLines, int kOutputs, bool kVector>
int launch_tiles(const TileParams& p, void* stream) {
  static_assert(kLines * kOutputs <= kWarpSize, "one lane writes one output");
  const int64_t line_tiles = ceil_div(p.lines, kLines);
  const int64_t blocks = ceil_div(p.n, kTileWarps * kOutputs) * line_tiles;
  const size_t shared = kNorm ? sizeof(NormShared<kLines>) + kLines * piece_packs<T, kLines>(p.k) * sizeof(Pack<T>) : 0;
  return launch(tile_kernel<kFinish, kNorm, T, kLines, kOutputs, kVector>, LaunchShape{blocks, kTileThreads, shared}, stream, p,
                line_tiles);
}

template <Finish kFinish, bool kNorm, typename T, int kOutputs>
int launch_lines(const TileParams& p, void* stream) {
  if (p.lines == 1) return launch_tiles<kFinish, kNorm, T, 1, kOutputs, true>(p, stream);
  if (p.lines == 2) return launch_tiles<kFinish, kNorm, T, 2, kOutputs, true>(p, stream);
  if (p.lines <= 4) return launch_tiles<kFinish, kNorm, T, 4, kOutputs, true>(p, stream);
  return launch_tiles<kFinish, kNorm, T, 8, kOutputs, true>(p, stream);
}

// Enqueues the kernel; lines and n are not 0.
template <Finish kFinish, bool kNorm>
int multiply(const TileParams& p, void* stream) {
  const bool vectors = p.k % kPack == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.weight) &&
                       are_whole_vectors(p.dtype, p.x_stride, p.weight_stride) && (!kNorm || is_vector_aligned(p.norm_weight));
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!vectors) return launch_tiles<kFinish, kNorm, T, 4, 1, false>(p, stream);
    if constexpr (kFactors<kFinish> == 1) {
      if (p.n >= kManyRows) return launch_lines<kFinish, kNorm, T, 4>(p, stream);
    }
    return launch_lines<kFinish, kNorm, T, 1>(p, stream);
  });
}

}  // namespace photon::cuda
