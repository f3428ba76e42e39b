// The kernel of every linear, for the few tokens of a decode step: a CTA multiplies a tile of
// tokens, as they are or normalized first, with the weight rows of its warps, and finishes the
// products on the spot. A product has the same bits whichever of these ops computes it. Memory
// bound there; right, but not fast, for long chunks.
#pragma once
#include "common/linear.h"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/norm.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// The dot products of a decode linear: one warp multiplies a few weight rows with a few tokens, so
// that a weight is read once for all of them. A lane takes every 32nd pack of eight along k and
// adds its products in that order into one accumulator per (token, row); a butterfly sums the
// lanes. Neither depends on how many tokens or rows share the warp: a token's result is the same
// alone and batched.

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

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarpSize;
constexpr int64_t kManyRows =
    8192;  // from here on one row a warp is more than the GPU holds at once: share x among four
constexpr int64_t kNormedBytes =
    32 * 1024;  // of normalized tokens in shared memory at once; longer tokens come in pieces

// The rows of a dense weight. What stands for it where numbers are stored otherwise
// (stored_linear.cu) has a type of rows with an add_dots() of its own; `row + columns` is the row
// from a later column on.
template <typename T>
struct DenseRows {
  const T* data;
  int64_t stride;

  __device__ const T* row(int64_t r) const { return data + r * stride; }
};

// Weight rows, n apart, that make one output.
template <Epilogue kEpilogue>
constexpr int kFactors = kEpilogue == Epilogue::kSwiglu ? 2 : 1;

struct TileParams {
  void* out;                // [tokens, n]; kAdd: the residual
  const void* x;            // [tokens, k]
  const void* norm_weight;  // [k]; unread by kernels that do not normalize
  const void* bias;         // [kFactors * n] or null
  const int32_t* counts;    // [1] or null
  int64_t tokens, n, k, out_stride, x_stride;
  float eps;
  DType dtype;
};

// Shared memory of a CTA that normalizes its tokens: this, then the packs of a piece of each
// token, one token after the other.
template <int kTokens>
struct alignas(16) NormShared {
  float partial[kTokens][kWarpSize];  // sums of squares, one a warp of the norm's
  float scales[kTokens];
};

// Packs of a token that are in shared memory at once. Pieces of whole steps leave the order of a
// sum as it is.
template <typename T, int kTokens>
PHOTON_HOST_DEVICE inline int64_t piece_packs(int64_t k) {
  constexpr int64_t kMost = kNormedBytes / (kTokens * sizeof(Pack<T>));
  static_assert(kMost * kPack % kDotStep == 0);
  const int64_t packs = (k + kPack - 1) / kPack;
  return packs < kMost ? packs : kMost;
}

// shared.scales[t] = what token t is multiplied with, for the `active` tokens from x on. All
// threads of the CTA must call it.
template <typename T, int kTokens, bool kVector>
__device__ inline void norm_scales(const TileParams& p, const T* x, int active,
                                   NormShared<kTokens>& shared) {
  static_assert(kTokens <= kTileWarps, "one warp adds up one token");
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int threads = norm_threads(p.k), warps = threads / kWarpSize;
  for (int i = warp; i < active * warps; i += kTileWarps) {
    const int t = i / warps, part = i % warps;
    const auto load = [&](int64_t d) {
      return load_pack<kVector>(x + t * p.x_stride + d, p.k - d);
    };
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

// add_dots of the normalized tokens, `active` of them from x on. All threads of the CTA must call
// it; a warp without rows only helps to normalize.
template <typename T, int kTokens, int kRows, bool kVector, typename Row>
__device__ inline void add_normed_dots(const TileParams& p, const T* x, int active, bool has_rows,
                                       const Row (&w)[kRows], float (&sums)[kTokens][kRows]) {
  auto& shared = *reinterpret_cast<NormShared<kTokens>*>(dynamic_shared());
  Pack<T>* const normed = reinterpret_cast<Pack<T>*>(&shared + 1);
  const int token_packs = static_cast<int>(piece_packs<T, kTokens>(p.k));
  norm_scales<T, kTokens, kVector>(p, x, active, shared);
  const T* tokens[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) tokens[t] = normed[(t < active ? t : 0) * token_packs].e;

  const int64_t piece = static_cast<int64_t>(token_packs) * kPack;
  for (int64_t begin = 0; begin < p.k; begin += piece) {
    const int64_t count = p.k - begin < piece ? p.k - begin : piece;
    const int packs = static_cast<int>((count + kPack - 1) / kPack);
    if (begin > 0) __syncthreads();  // all have read the piece before
    for (int i = threadIdx.x; i < active * packs; i += kTileThreads) {
      const int t = i / packs, pack = i % packs;
      const int64_t d = begin + pack * kPack, rest = p.k - d;
      const Pack<T> raw = load_pack<kVector>(x + t * p.x_stride + d, rest);
      const auto gain = load_pack<kVector>(static_cast<const T*>(p.norm_weight) + d, rest);
      normed[t * token_packs + pack] = normalized(raw, gain, shared.scales[t]);
    }
    __syncthreads();
    if (!has_rows) continue;
    Row rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = w[r] + begin;
    add_dots<T, kTokens, kRows, kVector>(tokens, rows, count, sums);
  }
}

// Writes output `n` of a token from the sums of its weight rows.
template <Epilogue kEpilogue, typename T>
__device__ inline void finish(const TileParams& p, int64_t token, int64_t n, const float* sums) {
  float products[kFactors<kEpilogue>];
#pragma unroll
  for (int f = 0; f < kFactors<kEpilogue>; ++f) {
    products[f] =
        sums[f] + (p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[f * p.n + n]) : 0.0f);
  }
  T* out = static_cast<T*>(p.out) + token * p.out_stride + n;
  if constexpr (kEpilogue == Epilogue::kStore) *out = from_float<T>(products[0]);
  if constexpr (kEpilogue == Epilogue::kAdd)
    *out = from_float<T>(to_float(*out) + rounded<T>(products[0]));
  if constexpr (kEpilogue == Epilogue::kSwiglu)
    *out = silu_times<T>(rounded<T>(products[0]), rounded<T>(products[1]));
}

// CTAs that share weight rows are neighbours, so that the rows come out of L2 after the first of
// them. A tile that reaches past the last token or row repeats its first one, and drops those
// results.
template <Epilogue kEpilogue, bool kNorm, typename T, int kTokens, int kOutputs, bool kVector,
          typename Rows>
__global__ void __launch_bounds__(kTileThreads)
    tile_kernel(const TileParams p, const Rows weight, int64_t token_tiles) {
  constexpr int kRows = kOutputs * kFactors<kEpilogue>;
  const int64_t tokens = active_tokens(p.counts, p.tokens);
  const int64_t first_token = blockIdx.x % token_tiles * kTokens;
  const int64_t first =
      (blockIdx.x / token_tiles * kTileWarps + threadIdx.x / kWarpSize) * kOutputs;
  if (first_token >= tokens || (!kNorm && first >= p.n)) return;

  const int active =
      static_cast<int>(tokens - first_token < kTokens ? tokens - first_token : kTokens);
  const T* x = static_cast<const T*>(p.x) + first_token * p.x_stride;
  decltype(weight.row(0)) w[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t n = first + r / kFactors<kEpilogue>;
    w[r] = weight.row((n < p.n ? n : first) + r % kFactors<kEpilogue> * p.n);
  }
  float sums[kTokens][kRows];
  clear_sums(sums);
  if constexpr (kNorm) {
    add_normed_dots<T, kTokens, kRows, kVector>(p, x, active, first < p.n, w, sums);
    if (first >= p.n) return;
  } else {
    const T* tile[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) tile[t] = x + (t < active ? t : 0) * p.x_stride;
    add_dots<T, kTokens, kRows, kVector>(tile, w, p.k, sums);
  }
  sum_lanes(sums);

  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (lane != t * kOutputs + o || t >= active || first + o >= p.n) continue;
      finish<kEpilogue, T>(p, first_token + t, first + o, sums[t] + o * kFactors<kEpilogue>);
    }
  }
}

template <Epilogue kEpilogue, bool kNorm, typename T, int kTokens, int kOutputs, bool kVector,
          typename Rows>
int launch_tiles(const TileParams& p, const Rows& weight, void* stream) {
  static_assert(kTokens * kOutputs <= kWarpSize, "one lane writes one output");
  const int64_t token_tiles = ceil_div(p.tokens, kTokens);
  const int64_t blocks = ceil_div(p.n, kTileWarps * kOutputs) * token_tiles;
  const size_t shared =
      kNorm ? sizeof(NormShared<kTokens>) + kTokens * piece_packs<T, kTokens>(p.k) * sizeof(Pack<T>)
            : 0;
  return launch(tile_kernel<kEpilogue, kNorm, T, kTokens, kOutputs, kVector, Rows>,
                LaunchShape{blocks, kTileThreads, shared}, stream, p, weight, token_tiles);
}

template <Epilogue kEpilogue, bool kNorm, typename T, int kOutputs>
int launch_tokens(const TileParams& p, const DenseRows<T>& weight, void* stream) {
  if (p.tokens == 1) return launch_tiles<kEpilogue, kNorm, T, 1, kOutputs, true>(p, weight, stream);
  if (p.tokens == 2) return launch_tiles<kEpilogue, kNorm, T, 2, kOutputs, true>(p, weight, stream);
  if (p.tokens <= 4) return launch_tiles<kEpilogue, kNorm, T, 4, kOutputs, true>(p, weight, stream);
  return launch_tiles<kEpilogue, kNorm, T, 8, kOutputs, true>(p, weight, stream);
}

template <Epilogue kEpilogue>
TileParams tile_params(const LinearParams& op) {
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  return {kAdds ? op.residual : op.out,
          op.x,
          op.norm_weight,
          op.bias,
          op.counts,
          op.tokens,
          op.outputs(),
          op.weight.k,
          kAdds ? op.residual_stride : op.out_stride,
          op.x_stride,
          op.eps,
          op.dtype};
}

// Behind Epilogue::kAdd the rest of kAddNorm.
inline int norm_residual(const LinearParams& p, void* stream) {
  return rms_norm({p.out, nullptr, p.residual, p.norm_weight, p.tokens, p.weight.n, p.out_stride, 0,
                   p.residual_stride, p.eps, p.dtype, p.counts},
                  stream);
}

// Whether tokens, and the weight of their norm, can be read in vectors.
template <bool kNorm>
bool are_tokens_vectors(const TileParams& p) {
  return p.k % kPack == 0 && is_vector_aligned(p.x) && are_whole_vectors(p.dtype, p.x_stride) &&
         (!kNorm || is_vector_aligned(p.norm_weight));
}

// Enqueues the kernel; tokens and outputs are not 0.
template <Epilogue kEpilogue, bool kNorm>
int launch_tile(const LinearParams& op, void* stream) {
  const Weight& w = op.weight;
  const TileParams p = tile_params<kEpilogue>(op);
  const bool vectors = are_tokens_vectors<kNorm>(p) && is_vector_aligned(w.data) &&
                       are_whole_vectors(p.dtype, w.stride);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const DenseRows<T> weight = {static_cast<const T*>(w.data), w.stride};
    if (!vectors) return launch_tiles<kEpilogue, kNorm, T, 4, 1, false>(p, weight, stream);
    if constexpr (kFactors<kEpilogue> == 1) {
      if (p.n >= kManyRows) return launch_tokens<kEpilogue, kNorm, T, 4>(p, weight, stream);
    }
    return launch_tokens<kEpilogue, kNorm, T, 1>(p, weight, stream);
  });
}

}  // namespace photon::cuda
