// What one CTA of chunk_attention holds in shared memory and computes: a tile of query rows, and
// tiles of kTileKeys keys and values.
//
// A warpgroup has 64 rows of the tile, and each row has an online softmax over the tiles of keys
// (Dao, "FlashAttention-2", 2023). A row's result depends on that row alone: tiles of keys
// start at multiples of kTileKeys, a tile outside of the row's part does not change a bit of it,
// and no step depends on the row's place in the tile or on the tile's size. A product that is added
// is written as fmaf, because the compiler could otherwise contract it in one instance of the
// kernel and not in another.
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
#include "cuda/warpgroup.cuh"

namespace photon::cuda {

constexpr int kVector = kVectorBytes / sizeof(Bf16);  // elements
constexpr int kDepth = 16;                            // of a matrix instruction
constexpr int kStages = 2;                            // tiles of keys that there is room for

// The sizes of one instance of the kernel. A warp has 16 rows, and all of head_dim. kCuts: this
// instance may cut contexts, so that its CTAs come in clusters.
template <int kHeadDim_, int kWarps_, bool kCuts_ = true>
struct ChunkPlan {
  using Whole = ChunkPlan<kHeadDim_, kWarps_, false>;
  static constexpr bool kCuts = kCuts_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = 16, kRows = kWarps * kWarpRows;
  static constexpr int kSlices = static_cast<int>(ceil_div(kHeadDim, kSliceColumns));
  static constexpr int kWidth = kSlices * kSliceColumns;  // of a row in shared memory
  static constexpr int kTile = kTileKeys * kWidth;        // elements
  static constexpr int kVectors = kHeadDim / kVector;     // of a row
  static constexpr int kWarpKeys = kTileKeys / kWarps;    // keys of a tile that a warp copies
  static constexpr int kStepRows =
      kWarpSize / kVectors;  // rows that a warp copies at once: a lane copies a vector, or is idle
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256 && kWarpKeys % kStepRows == 0 &&
                kWarpRows % kStepRows == 0 && kRows % kWarpgroupRows == 0);

  // Where a vector of a row stands in a tile of `tile_rows` rows in shared memory: slice after
  // slice, each as half tiles are (half_tile_map.cuh).
  static __device__ int place(int tile_rows, int row, int vector) {
    const int slice = vector / 8;
    return ((slice * tile_rows + row) * 8 + (vector % 8 ^ row % 8)) * kVector;
  }

  // Where eight columns of a row's sums stand. The order changes from row to row, so that the same
  // columns of four consecutive rows lie in different banks.
  static __device__ int sum_place(int row, int column_block) {
    return row * kHeadDim + (column_block ^ row % 4) * 8;
  }
};

// What a CTA works on: some consecutive tokens and a KV head. Row i of its tile is token i / group,
// and of the query heads that share the KV head number i % group. The CTAs of a cluster have the
// same tile; each takes one part of every context.
struct ChunkTask {
  int first_token, tokens;  // tokens <= 0: there is nothing to do
  int kv_head, group;       // group: query heads of a KV head
  // The CTA's rank in its cluster, and how many CTAs the cluster has: at least as many as any
  // context has parts, or one, where no context is cut.
  int rank, blocks;

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
  int parts;  // of the longest context
  Span part;  // the positions of the CTA's part, over all tokens of the run

  __device__ bool has(int token) const { return token >= first && token < end; }
};

template <typename Plan>
struct ChunkShared {
  alignas(kHalfTileAlignment) Bf16 q[Plan::kRows * Plan::kWidth];  // queries, later outputs
  // Tiles of keys, then as many of values; at the end the rows' sums, for the cluster.
  alignas(kHalfTileAlignment) Bf16 keys_and_values[2 * kStages * Plan::kTile];
  Barrier arrived[kStages];  // of tensor copies, by stage: one thread arrives, for all bytes
  ChunkTask task;
  Run run;                                          // the one that the CTA works on
  int32_t rows[Plan::kRows], lengths[Plan::kRows];  // of the tile's tokens
  Span own_parts[Plan::kRows];  // the part of each row's context; empty: not in this run
  float2 weights[Plan::kRows];  // of each row's part: its highest score, and the sum of its weights
  int32_t longest;              // of the step's contexts
  int32_t poisoned[Plan::kHeadDim];  // by dim: the lowest position whose value was not finite, and
                                     // so was hidden; INT_MAX: none

  __device__ int parts(int32_t length) const {
    return Plan::kCuts ? min(parts_of(length), task.blocks) : 1;
  }
  __device__ Span part(int32_t length) const {
    return Plan::kCuts ? part_of(length, task.rank, parts(length)) : Span{0, length};
  }

  __device__ Bf16* keys(uint32_t stage) { return keys_and_values + stage * Plan::kTile; }
  __device__ Bf16* values(uint32_t stage) {
    return keys_and_values + (kStages + stage) * Plan::kTile;
  }
  __device__ float* sums() { return reinterpret_cast<float*>(keys_and_values); }
  __device__ const float* sums() const { return reinterpret_cast<const float*>(keys_and_values); }
  static_assert(Plan::kRows * Plan::kHeadDim * sizeof(float) <=
                sizeof(Bf16) * 2 * kStages * Plan::kTile);
};

// The first of the two rows that a lane has. The second comes 8 rows later.
template <typename Plan>
__device__ int lane_row() {
  return threadIdx.x / kWarpSize * Plan::kWarpRows + threadIdx.x % kWarpSize / 4;
}

// What a lane has of its two rows: of each eight columns n two of the first row, sum[4 n] and
// sum[4 n + 1], and of the second, sum[4 n + 2] and sum[4 n + 3].
template <typename Plan>
struct RowSoftmax {
  float high[2];   // the highest score so far
  float total[2];  // the sum of the weights of this lane's columns
  float sum[Plan::kWidth / 2];

  __device__ void clear() {
    high[0] = high[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (float& each : sum) each = 0.0f;
  }
};

using Scores = float[kTileKeys / 2];      // as RowSoftmax::sum
using Weights = uint32_t[kTileKeys / 4];  // pairs of bf16: of each eight keys n weights[2 n] of the
                                          // first row, and weights[2 n + 1] of the second

// Tile rows from `first_row` on, slice number `slice` of a tile of `tile_rows` rows.
__device__ inline HalfTileFragment fragment_of(const Bf16* tile, int tile_rows, int slice,
                                               int first_row) {
  return HalfTileFragment(reinterpret_cast<const unsigned char*>(
      tile + (slice * tile_rows + first_row) * kSliceColumns));
}

// Computes scores = q k^T for the warpgroup's rows. All its warps must call it.
template <typename Plan>
__device__ void multiply_keys(Scores& scores, const Bf16* q, const Bf16* k) {
  constexpr int kSliceSteps = kSliceColumns / kDepth;
  const int first_row = threadIdx.x / kWarpgroupThreads * kWarpgroupRows;
#pragma unroll
  for (float& each : scores) each = 0.0f;
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < Plan::kHeadDim / kDepth; ++step) {
    const int slice = step / kSliceSteps;
    warpgroup_multiply<kSliceBytes, kSliceBytes>(
        scores, fragment_of(q, Plan::kRows, slice, first_row), fragment_of(k, kTileKeys, slice, 0),
        step % kSliceSteps);
  }
  warpgroup_wait();
}

// Makes the scores of positions outside of a row's part -inf. The tile of keys starts at
// `first_position`.
template <typename Plan>
__device__ void hide_scores(Scores& scores, const Span* own_parts, int32_t first_position) {
  const int32_t own = first_position + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Span part = own_parts[lane_row<Plan>() + half * 8];
    const int32_t begin = Plan::kCuts ? part.first : 0, from = own - begin;
    const uint32_t count =
        part.end - begin;  // a position before the part is a large number as an unsigned one
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      if (static_cast<uint32_t>(from + n * 8) >= count) scores[4 * n + 2 * half] = -INFINITY;
      if (static_cast<uint32_t>(from + n * 8 + 1) >= count)
        scores[4 * n + 2 * half + 1] = -INFINITY;
    }
  }
}

// Turns scores into weights relative to the highest score so far. Where that has risen, it scales
// what is summed already accordingly. `scale` is the op's scale times log2(e).
template <typename Plan>
__device__ void weigh_scores(Weights& weights, const Scores& scores, RowSoftmax<Plan>& state,
                             float scale) {
  float keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float high = state.high[half];
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n)
      high = fmaxf(high, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
    high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
    const float base =
        high == -INFINITY ? 0.0f : high * scale;  // without a position weights are 0, not NaN
    keep[half] =
        high == state.high[half] ? 1.0f : exp2_approx(fmaf(state.high[half], scale, -base));
    state.high[half] = high;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      const float left = exp2_approx(fmaf(scores[4 * n + 2 * half], scale, -base));
      const float right = exp2_approx(fmaf(scores[4 * n + 2 * half + 1], scale, -base));
      added += left + right;
      weights[2 * n + half] = pack_bf16(left, right);
    }
    state.total[half] = fmaf(state.total[half], keep[half], added);
  }
  const bool changed = keep[0] != 1.0f || keep[1] != 1.0f;
  if (!__any_sync(kFullWarp, changed)) return;  // all factors are 1, which changes no bit
#pragma unroll
  for (int i = 0; i < Plan::kWidth / 2; ++i) state.sum[i] *= keep[i % 4 / 2];
}

// Adds the product of weights and values to the warpgroup's sums. All its warps must call it.
template <typename Plan>
__device__ void multiply_values(RowSoftmax<Plan>& state, const Weights& weights, const Bf16* v) {
  warpgroup_begin();
#pragma unroll
  for (int key = 0; key < kTileKeys; key += kDepth) {
    const uint32_t* const own = weights + key / 4;
    const uint32_t a[4] = {own[0], own[1], own[2], own[3]};
#pragma unroll
    for (int slice = 0; slice < Plan::kSlices; ++slice) {
      float (&sums)[32] = *reinterpret_cast<float (*)[32]>(&state.sum[slice * 32]);
      warpgroup_multiply_rows<kSliceBytes>(sums, a, fragment_of(v, kTileKeys, slice, key));
    }
  }
  warpgroup_wait();
}

}  // namespace photon::cuda
