// What one block of chunk_attention holds and computes: a tile of query rows, and tiles of
// kTileKeys keys and values in shared memory.
//
// The rows go through matrix instructions 16 at a time, with an online softmax over the tiles of
// keys (Dao, "FlashAttention-2", 2023). A row's arithmetic is its own: tiles of keys start at
// multiples of kTileKeys, those outside of its part leave it as it was bit for bit, and no step of
// it depends on the place of the row in the tile or on the size of the tile. Products that are
// added are written as fmaf: what the compiler contracts could otherwise differ from one instance
// of the kernel to the next.
#pragma once
#include <climits>
#include <cmath>
#include <cstddef>

#include "common/kv.h"
#include "cuda/bf16.cuh"
#include "cuda/chunk_parts.cuh"
#include "cuda/launch.cuh"
#include "cuda/log2e.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kVector = kVectorBytes / sizeof(Bf16);  // elements
constexpr int kFragment = 16;  // rows and depth of a matrix instruction; two of its widths

// The sizes of one instance: each warp owns kFragments times 16 rows and all of head_dim. kCuts: it
// may cut contexts, for which it needs more registers, and its blocks come in clusters.
template <int kHeadDim_, int kWarps_, int kFragments_, bool kCuts_ = true>
struct ChunkPlan {
  using Whole = ChunkPlan<kHeadDim_, kWarps_, kFragments_, false>;
  static constexpr bool kCuts = kCuts_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kFragments = kFragments_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kFragments * kFragment, kRows = kWarps * kWarpRows;
  static constexpr int kTile = kTileKeys * kHeadDim;    // elements
  static constexpr int kVectors = kHeadDim / kVector;   // of a row
  static constexpr int kWarpKeys = kTileKeys / kWarps;  // keys of a tile that a warp copies
  static constexpr int kScores = kTileKeys / 8;         // column blocks of the scores
  static constexpr int kColumns = kHeadDim / 8;         // column blocks of the output
  static constexpr int kStepRows =
      kWarpSize / kVectors;  // rows that a warp copies at once, a vector a lane; other lanes idle
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256 && kWarpKeys % kStepRows == 0 &&
                kWarpRows % kStepRows == 0);

  // Where a vector of a row stands in a tile in shared memory: the same vector of eight consecutive
  // rows lies in eight different banks.
  static constexpr int kTurns = kVectors % 8 == 0 ? 8 : 4;
  static __device__ int place(int row, int vector) {
    const int turn = kTurns == 8 ? row % 8 : row / 2 % 4;
    return (row * kVectors + (vector ^ turn)) * kVector;
  }

  // Where eight columns of a row's sums stand: those of four consecutive rows lie in different
  // banks.
  static __device__ int sum_place(int row, int column_block) {
    return row * kHeadDim + (column_block ^ row % 4) * 8;
  }

  // From the place of vector 0 or 1 to that of vector `by` or `by` + 1 of the same row; `by` is
  // even.
  static __device__ int along(int place, int by) {
    return (place ^ by % kTurns * kVector) + by / kTurns * kTurns * kVector;
  }
};

// What a block works on: some consecutive tokens and a KV head. Row i of its tile is token i /
// group, head i % group of the KV head's. The blocks of a cluster have the same tile, and each has
// one part of every past.
struct ChunkTask {
  int first_token, tokens;  // no tokens (0 or less): nothing to do
  int kv_head, group;       // group: query heads of a KV head
  int rank, blocks;  // of the cluster; at least as many blocks as any past has parts, or one: then
                     // no context is cut

  // Where a row stands in a tensor of query heads with these strides.
  __device__ int64_t offset(int row, int64_t token_stride, int64_t head_stride) const {
    return (first_token + row / group) * token_stride +
           (kv_head * group + row % group) * head_stride;
  }
};

// Tokens [first, end) of a tile, all of one row of the table; least and most are their lengths.
struct Run {
  int first, end;
  int32_t row, least, most;
  int parts;  // of the longest
  Span part;  // from the first position to the last that any of them has in the block's part

  __device__ bool has(int token) const { return token >= first && token < end; }
};

template <typename Plan>
struct ChunkShared {
  alignas(128) Bf16 q[Plan::kRows * Plan::kHeadDim];   // a warp reads and writes its own rows only;
                                                       // the output leaves through them
  alignas(128) Bf16 keys_and_values[4 * Plan::kTile];  // two tiles of keys, two of values; at last
                                                       // the rows' sums, for the cluster
  ChunkTask task;
  Run run;                                          // the present one
  int32_t rows[Plan::kRows], lengths[Plan::kRows];  // of the tile's tokens; length 0: dead, row -1
  Span own_parts[Plan::kRows];  // of the rows' tokens; none: not in this run. A warp's own, like q
  float2
      weights[Plan::kRows];  // of the block's part of a row: the highest score, the sum of weights
  int32_t poisoned[Plan::kHeadDim];  // lowest position whose value was not finite there and was
                                     // hidden, INT_MAX if none

  __device__ int parts(int32_t length) const {
    return Plan::kCuts ? min(parts_of(length), task.blocks) : 1;
  }
  __device__ Span part(int32_t length) const {
    return Plan::kCuts ? part_of(length, task.rank, parts(length)) : Span{0, length};
  }

  __device__ Bf16* keys(int stage) { return keys_and_values + stage * Plan::kTile; }
  __device__ Bf16* values(int stage) { return keys_and_values + (2 + stage) * Plan::kTile; }
  __device__ float* sums() { return reinterpret_cast<float*>(keys_and_values); }
  __device__ const float* sums() const { return reinterpret_cast<const float*>(keys_and_values); }
  static_assert(Plan::kRows * Plan::kHeadDim * sizeof(float) <= 4 * Plan::kTile * sizeof(Bf16));
};

// The first row of a lane in its warp's fragment number `fragment`; the second is 8 further on.
template <typename Plan>
__device__ int lane_row(int fragment) {
  return threadIdx.x / kWarpSize * Plan::kWarpRows + fragment * kFragment +
         threadIdx.x % kWarpSize / 4;
}

template <typename Plan>
struct RowSoftmax {
  float high[Plan::kFragments][2];   // highest score so far
  float total[Plan::kFragments][2];  // this lane's share of the sum of weights
  float sum[Plan::kFragments][Plan::kColumns][4];

  __device__ void clear() {
#pragma unroll
    for (int f = 0; f < Plan::kFragments; ++f) {
      high[f][0] = high[f][1] = -INFINITY;
      total[f][0] = total[f][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < Plan::kColumns; ++n)
        sum[f][n][0] = sum[f][n][1] = sum[f][n][2] = sum[f][n][3] = 0.0f;
    }
  }
};

template <typename Plan>
using Scores = float[Plan::kFragments][Plan::kScores][4];
template <typename Plan>
using Weights = uint32_t[Plan::kFragments][Plan::kScores]
                        [2];  // bf16 pairs: as scores, rows lane / 4 and lane / 4 + 8

// scores = q k^T.
template <typename Plan>
__device__ void multiply_keys(Scores<Plan>& scores, const Bf16* q, const Bf16* k) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int q_place = Plan::place(warp * Plan::kWarpRows + lane % 16, lane / 16);
  const int k_place = Plan::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < Plan::kScores; ++n)
      scores[f][n][0] = scores[f][n][1] = scores[f][n][2] = scores[f][n][3] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < Plan::kVectors; d += 2) {
    uint32_t a[Plan::kFragments][4];
#pragma unroll
    for (int f = 0; f < Plan::kFragments; ++f) {
      load_matrices(a[f], q + Plan::along(q_place, d) + f * kFragment * Plan::kHeadDim);
    }
#pragma unroll
    for (int n = 0; n < Plan::kScores; n += 2) {
      uint32_t b[4];
      load_matrices(b, k + Plan::along(k_place, d) + n * 8 * Plan::kHeadDim);
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
      for (int f = 0; f < Plan::kFragments; ++f) {
        multiply_bf16(scores[f][n], a[f], left);
        multiply_bf16(scores[f][n + 1], a[f], right);
      }
    }
  }
}

// Scores of positions outside of a row's part become -inf. The tile of keys starts at
// `first_position`.
template <typename Plan>
__device__ void hide_scores(Scores<Plan>& scores, const Span* own_parts, int32_t first_position) {
  const int32_t own = first_position + threadIdx.x % 4 * 2;
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Span part = own_parts[lane_row<Plan>(f) + half * 8];
      const int32_t begin = Plan::kCuts ? part.first : 0, from = own - begin;
      const uint32_t count =
          part.end - begin;  // what is before the part is a large number, unsigned
#pragma unroll
      for (int n = 0; n < Plan::kScores; ++n) {
        if (static_cast<uint32_t>(from + n * 8) >= count) scores[f][n][2 * half] = -INFINITY;
        if (static_cast<uint32_t>(from + n * 8 + 1) >= count)
          scores[f][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Turns scores into weights relative to the highest score so far, and what is summed already with
// it. `scale` is in units of log 2.
template <typename Plan>
__device__ void weigh_scores(Weights<Plan>& weights, const Scores<Plan>& scores,
                             RowSoftmax<Plan>& state, float scale) {
  float keep[Plan::kFragments][2];
  bool changed = false;
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = state.high[f][half];
#pragma unroll
      for (int n = 0; n < Plan::kScores; ++n)
        high = fmaxf(high, fmaxf(scores[f][n][2 * half], scores[f][n][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
      const float base =
          high == -INFINITY ? 0.0f : high * scale;  // no position yet: weights 0, not NaN
      keep[f][half] =
          high == state.high[f][half] ? 1.0f : exp2f(fmaf(state.high[f][half], scale, -base));
      changed |= keep[f][half] != 1.0f;
      state.high[f][half] = high;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < Plan::kScores; ++n) {
        const float left = exp2f(fmaf(scores[f][n][2 * half], scale, -base));
        const float right = exp2f(fmaf(scores[f][n][2 * half + 1], scale, -base));
        added += left + right;
        weights[f][n][half] = pack_bf16(left, right);
      }
      state.total[f][half] = fmaf(state.total[f][half], keep[f][half], added);
    }
  }
  if (!__any_sync(kFullWarp, changed)) return;  // times 1 changes no bit
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < Plan::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.sum[f][n][i] *= keep[f][i / 2];
    }
  }
}

// sum += weights v.
template <typename Plan>
__device__ void multiply_values(RowSoftmax<Plan>& state, const Weights<Plan>& weights,
                                const Bf16* v) {
  const int own = Plan::place(threadIdx.x % 16, threadIdx.x % kWarpSize / 16);
#pragma unroll
  for (int key = 0; key < kTileKeys; key += kFragment) {
    uint32_t a[Plan::kFragments][4];
#pragma unroll
    for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[f][i] = weights[f][key / 8 + i / 2][i % 2];
    }
#pragma unroll
    for (int n = 0; n < Plan::kColumns; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, v + Plan::along(own, n) + key * Plan::kHeadDim);
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
      for (int f = 0; f < Plan::kFragments; ++f) {
        multiply_bf16(state.sum[f][n], a[f], left);
        multiply_bf16(state.sum[f][n + 1], a[f], right);
      }
    }
  }
}

}  // namespace photon::cuda
