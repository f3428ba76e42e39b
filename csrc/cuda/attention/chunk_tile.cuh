// What one CTA of chunk_attention holds in shared memory and computes: a tile of query rows, and
// tiles of kTileKeys keys and values.
//
// Matrix instructions take 16 rows at a time, and each row has an online softmax over the tiles of
// keys (Dao, "FlashAttention-2", 2023). A row's result depends on that row alone: tiles of keys
// start at multiples of kTileKeys, a tile outside of the row's part does not change a bit of it,
// and no step depends on the row's place in the tile or on the tile's size. A product that is added
// is written as fmaf, because the compiler could otherwise contract it in one instance of the
// kernel and not in another.
#pragma once
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/kv.h"
#include "cuda/attention/kv_pack.cuh"
#include "cuda/bf16.cuh"
#include "cuda/launch.cuh"
#include "cuda/log2e.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// --- how the context of a token is cut into parts: one for each CTA of a cluster -----------------
//
// How a context is cut depends on its length alone, so that a token has the same bits whatever else
// is in the step. A short context stays whole: to begin, and to add up the parts, takes a CTA as
// long as two or three tiles of keys, and a part of 1,024 positions would have no more than that.

constexpr int kTileKeys = 64;
constexpr int kParts = 7;         // CTAs of a cluster: of 7, 32 fit on an H200 at a time, which is
                                  // 256 tokens of 16 heads; of 8, only 30
constexpr int kWholeKeys = 1024;  // longest context that stays whole
static_assert(kWholeKeys / kTileKeys >= kParts, "every part of a cut context has a tile");

__host__ __device__ constexpr bool is_cut(int64_t length) { return length > kWholeKeys; }

// Positions [first, end) of a context.
struct Span {
  int32_t first, end;

  __device__ bool is_empty() const { return end <= first; }
};

// Part number `part` of a context that is cut: whole tiles of keys, except where the context ends.
// Neither end is earlier for a longer context.
__device__ inline Span part_of(int32_t length, int part) {
  const int tiles = (length + kTileKeys - 1) / kTileKeys;
  return {tiles * part / kParts * kTileKeys, min(tiles * (part + 1) / kParts * kTileKeys, length)};
}

// --- a tile --------------------------------------------------------------------------------------

constexpr int kVector = kVectorBytes / sizeof(Bf16);  // elements
constexpr int kFragment = 16;  // rows and depth of a matrix instruction, and twice its width

// The sizes of one instance of the kernel. A warp has kFragments times 16 rows, and all of
// head_dim. kCuts: this instance cuts contexts, so that its CTAs come in clusters, and it needs
// more registers. Element: of keys and values, Bf16 or E4m3.
template <int kHeadDim_, int kWarps_, int kFragments_, bool kCuts_ = true, typename Element_ = Bf16>
struct ChunkPlan {
  using Element = Element_;
  using Whole = ChunkPlan<kHeadDim_, kWarps_, kFragments_, false, Element>;
  static constexpr bool kIsScaled = std::is_same_v<Element, E4m3>;
  static constexpr bool kCuts = kCuts_;
  static constexpr int kCluster = kCuts ? kParts : 1;  // CTAs of a cluster
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kFragments = kFragments_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kFragments * kFragment, kRows = kWarps * kWarpRows;
  static constexpr int kTile = kTileKeys * kHeadDim;    // elements
  static constexpr int kVectors = kHeadDim / kVector;   // of a row
  static constexpr int kWarpKeys = kTileKeys / kWarps;  // keys of a tile that a warp copies
  static constexpr int kScores = kTileKeys / 8;         // groups of eight columns of the scores
  static constexpr int kColumns = kHeadDim / 8;         // groups of eight columns of the output
  static constexpr int kStepRows =
      kWarpSize / kVectors;  // rows that a warp copies at once: a lane copies a vector, or is idle
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256 && kWarpKeys % kStepRows == 0 &&
                kWarpRows % kStepRows == 0);

  // The CTA's rank in its cluster.
  static __device__ int rank() { return static_cast<int>(blockIdx.x) % kCluster; }

  // The CTA's part of a context of this length.
  static __device__ Span part(int32_t length) {
    return kCuts ? part_of(length, rank()) : Span{0, length};
  }

  // Where a vector of a row stands in a tile in shared memory. The order of a row's vectors changes
  // from row to row, so that the same vector of eight consecutive rows lies in different banks.
  static constexpr int kTurns = kVectors % 8 == 0 ? 8 : 4;
  static __device__ int place(int row, int vector) {
    const int turn = kTurns == 8 ? row % 8 : row / 2 % 4;
    return (row * kVectors + (vector ^ turn)) * kVector;
  }

  // Where eight columns of a row's sums stand. The order changes from row to row, so that the same
  // columns of four consecutive rows lie in different banks.
  static __device__ int sum_place(int row, int column_block) {
    return row * kHeadDim + (column_block ^ row % 4) * 8;
  }

  // Given the place of vector 0 or 1 of a row, the place of vector `by` or `by` + 1 of that row.
  // `by` must be even.
  static __device__ int along(int place, int by) {
    return (place ^ by % kTurns * kVector) + by / kTurns * kTurns * kVector;
  }
};

// What a CTA works on: some consecutive tokens and a KV head. Row i of its tile is token i / group,
// and of the query heads that share the KV head number i % group. The CTAs of a cluster have the
// same tile; each takes the part of every context that has the number of its rank.
struct ChunkTask {
  int first_token, tokens;  // tokens <= 0: there is nothing to do
  int kv_head, group;       // group: query heads of a KV head

  // Where a row stands in a tensor of query heads with these strides.
  __device__ int64_t offset(int row, int64_t token_stride, int64_t head_stride) const {
    return (first_token + row / group) * token_stride +
           (kv_head * group + row % group) * head_stride;
  }
};

// What stands for a token's row where the token is dead, or its context is the other kernel's work.
constexpr int32_t kDeadRow = -1, kOtherKernel = -2;

// A run: consecutive tokens [first, end) of a tile that are all of one row of the table. `least`
// and `most` are the smallest and the largest of their lengths.
struct Run {
  int first, end;
  int32_t row, least, most;
  Span part;  // the positions of the CTA's part, over all tokens of the run

  __device__ bool has(int token) const { return token >= first && token < end; }
};

// The scales of two tiles of keys and values, where they have any.
template <bool kIsScaled>
struct ChunkScales {
  __device__ const TileScales<kTileKeys>* scales_of(int) const { return nullptr; }
};

template <>
struct ChunkScales<true> {
  TileScales<kTileKeys> scales[2];

  __device__ const TileScales<kTileKeys>* scales_of(int stage) const { return &scales[stage]; }
};

template <typename Plan>
struct ChunkShared : ChunkScales<Plan::kIsScaled> {
  alignas(128) Bf16 q[Plan::kRows * Plan::kHeadDim];   // queries, later outputs; a warp reads and
                                                       // writes its own rows only
  alignas(128) Bf16 keys_and_values[4 * Plan::kTile];  // two tiles of keys and two of values (in
                                                       // fp8 one each, and codes of the next); at
                                                       // the end the rows' sums, for the cluster
  ChunkTask task;
  Run run;                                          // the one that the CTA works on
  int32_t rows[Plan::kRows], lengths[Plan::kRows];  // of the tile's tokens
  Span own_parts[Plan::kRows];  // the part of each row's context; empty: not in this run. A warp
                                // reads and writes its own rows only
  float2 weights[Plan::kRows];  // of each row's part: its highest score, and the sum of its weights
  int32_t longest;              // of the step's contexts
  int32_t poisoned[Plan::kHeadDim];  // by dim: the lowest position whose value was not finite, and
                                     // so was hidden; INT_MAX: none

  __device__ Bf16* keys(int stage) { return keys_and_values + tile(stage) * Plan::kTile; }
  __device__ Bf16* values(int stage) { return keys_and_values + (2 + tile(stage)) * Plan::kTile; }
  __device__ uint4* key_codes() { return reinterpret_cast<uint4*>(keys_and_values + Plan::kTile); }
  __device__ uint4* value_codes() {
    return reinterpret_cast<uint4*>(keys_and_values + 3 * Plan::kTile);
  }
  __device__ float* sums() { return reinterpret_cast<float*>(keys_and_values); }
  __device__ const float* sums() const { return reinterpret_cast<const float*>(keys_and_values); }
  static_assert(Plan::kRows * Plan::kHeadDim * sizeof(float) <= 4 * Plan::kTile * sizeof(Bf16));

 private:
  static __device__ int tile(int stage) { return Plan::kIsScaled ? 0 : stage; }
};

// The first of the two rows that a lane has in its warp's fragment number `fragment`. The second
// comes 8 rows later.
template <typename Plan>
__device__ int lane_row(int fragment) {
  return threadIdx.x / kWarpSize * Plan::kWarpRows + fragment * kFragment +
         threadIdx.x % kWarpSize / 4;
}

template <typename Plan>
struct RowSoftmax {
  float high[Plan::kFragments][2];   // the highest score so far
  float total[Plan::kFragments][2];  // the sum of the weights of this lane's columns
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
                        [2];  // pairs of bf16, placed as scores: rows lane / 4 and lane / 4 + 8

// Computes scores = q k^T for the warp's rows.
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

// The scales of the two columns that a lane has of the scores' group number `n`.
__device__ inline float2 column_scales(const float* scales, int n) {
  return *reinterpret_cast<const float2*>(scales + n * 8 + threadIdx.x % 4 * 2);
}

// Multiplies scores by the scales of their keys.
template <typename Plan>
__device__ void scale_scores(Scores<Plan>& scores, const TileScales<kTileKeys>& tile) {
#pragma unroll
  for (int n = 0; n < Plan::kScores; ++n) {
    const float2 by = column_scales(tile.keys, n);
#pragma unroll
    for (int f = 0; f < Plan::kFragments; ++f) {
      scores[f][n][0] *= by.x;
      scores[f][n][1] *= by.y;
      scores[f][n][2] *= by.x;
      scores[f][n][3] *= by.y;
    }
  }
}

// Rounds weights, which stand where scores were, times the scales of their values.
template <typename Plan>
__device__ void scale_weights(Weights<Plan>& weights, const Scores<Plan>& exact,
                              const TileScales<kTileKeys>& tile) {
#pragma unroll
  for (int n = 0; n < Plan::kScores; ++n) {
    const float2 by = column_scales(tile.values, n);
#pragma unroll
    for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[f][n][half] =
            pack_bf16(exact[f][n][2 * half] * by.x, exact[f][n][2 * half + 1] * by.y);
    }
  }
}

// Makes the scores of positions outside of a row's part -inf. The tile of keys starts at
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
          part.end - begin;  // a position before the part is a large number as an unsigned one
#pragma unroll
      for (int n = 0; n < Plan::kScores; ++n) {
        if (static_cast<uint32_t>(from + n * 8) >= count) scores[f][n][2 * half] = -INFINITY;
        if (static_cast<uint32_t>(from + n * 8 + 1) >= count)
          scores[f][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Turns scores into weights relative to the highest score so far. Where that has risen, it scales
// what is summed already accordingly. `scale` is the op's scale times log2(e). Where values have
// scales (`tile`), weights are multiplied by them, but not where they are summed; scores are lost.
template <typename Plan>
__device__ void weigh_scores(Weights<Plan>& weights, Scores<Plan>& scores, RowSoftmax<Plan>& state,
                             float scale, const TileScales<kTileKeys>* tile) {
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
          high == -INFINITY ? 0.0f : high * scale;  // without a position weights are 0, not NaN
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
        if constexpr (Plan::kIsScaled) {
          scores[f][n][2 * half] = left;
          scores[f][n][2 * half + 1] = right;
        } else {
          weights[f][n][half] = pack_bf16(left, right);
        }
      }
      state.total[f][half] = fmaf(state.total[f][half], keep[f][half], added);
    }
  }
  if constexpr (Plan::kIsScaled) scale_weights<Plan>(weights, scores, *tile);
  if (!__any_sync(kFullWarp, changed)) return;  // all factors are 1, which changes no bit
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < Plan::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.sum[f][n][i] *= keep[f][i / 2];
    }
  }
}

// Adds the product of weights and values to the warp's sums.
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
