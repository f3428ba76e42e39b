// What a consumer of balanced_attention computes: 64 rows of a tile, each with an online softmax
// over the KV tiles of its partial tile. A tile's scores are multiplied beside the values of the
// tile before (Shah et al., "FlashAttention-3", 2024).
#pragma once
#include <cmath>

#include "cuda/attention/balanced_tile.cuh"
#include "cuda/log2e.cuh"

namespace photon::cuda {

constexpr int kScores = kTileKeys / 2;  // of a thread: of two rows, 8 n + 2 (lane % 4) and the next

template <typename Plan>
struct BalancedSoftmax {
  float high[2] = {-INFINITY, -INFINITY};  // of each of the two rows: the highest score so far
  float total[2] = {};                     // the sum of the weights of this thread's columns
  float sum[Plan::kColumns * 4] = {};      // as the scores of a thread stand
};

// The rows of a tile that a thread has: this one, and the one 8 rows later.
__device__ inline int own_row() {
  return static_cast<int>(threadIdx.x) / kWarpSize * 16 - kWarpgroupThreads / 2 +
         static_cast<int>(threadIdx.x) % kWarpSize / 4;
}

__device__ inline int own_group() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1; }

// The lengths of the thread's two rows. A row that is in no token has no bound.
struct RowLengths {
  int32_t of[2];

  __device__ RowLengths(const StepTokens& tokens, const PartialTile& partial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = (own_row() + half * 8) / tokens.sharers;
      of[half] =
          token < partial.tokens ? tokens.context(partial.first_token + token).length : INT_MAX;
    }
  }

  // Of all rows of the warp, which must call it as a whole.
  __device__ int32_t least() const { return warp_least(min(of[0], of[1])); }
};

// Makes the scores of positions behind a row's context -inf.
__device__ inline void hide_scores(float (&scores)[kScores], const RowLengths& lengths,
                                   int32_t first_position) {
  const int32_t own = first_position + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t left = lengths.of[half] - own;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      if (n * 8 >= left) scores[4 * n + 2 * half] = -INFINITY;
      if (n * 8 + 1 >= left) scores[4 * n + 2 * half + 1] = -INFINITY;
    }
  }
}

// Turns scores into weights relative to the highest score so far, in their place, and notes in
// `keep` by how much what is summed already has to be scaled. `scale` is the op's scale times
// log2(e).
template <typename Plan>
__device__ void weigh_scores(float (&scores)[kScores], BalancedSoftmax<Plan>& state,
                             float (&keep)[2], float scale) {
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
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[4 * n + 2 * half + i];
        score = exp2_approx(fmaf(score, scale, -base));
        added += score;
      }
    }
    state.total[half] = fmaf(state.total[half], keep[half], added);
  }
}

template <typename Plan>
__device__ void scale_sums(BalancedSoftmax<Plan>& state, const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < Plan::kColumns * 4; ++i) state.sum[i] *= keep[i / 2 % 2];
}

using BalancedWeights = uint32_t[kTileKeys / 16][4];  // pairs of bf16, as operands of instructions

__device__ inline void pack_weights(BalancedWeights& weights, const float (&scores)[kScores]) {
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      weights[i][j] = pack_bf16(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
  }
}

// Starts scores = q k^T for the group's rows.
template <typename Plan>
__device__ void multiply_keys(float (&scores)[kScores], const Bf16* queries, const Bf16* keys) {
  const RowTileFragment q(reinterpret_cast<const unsigned char*>(
      queries + own_group() * (kTileRows / kConsumers) * kKBlockColumns)),
      k(reinterpret_cast<const unsigned char*>(keys));
#pragma unroll
  for (int d = 0; d < Plan::kHeadDim / 16; ++d) {
    const int slice = d / 4 * Plan::kSliceBytes;
    multiply_rows(scores, q.after(slice), k.after(slice), d % 4, d > 0);
  }
  warpgroup_commit();
}

// Starts the addition of the product of weights and values to the sums.
template <typename Plan>
__device__ void add_values(BalancedSoftmax<Plan>& state, const BalancedWeights& weights,
                           const Bf16* values) {
  const RowTileFragment v(reinterpret_cast<const unsigned char*>(values));
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    multiply_values<Plan::kSliceBytes>(state.sum, weights[i], v.after(i * 2 * kKBlockBytes));
  warpgroup_commit();
}

// Waits for a tile, which instructions may read then.
__device__ inline void wait_tile(Barrier& barrier, int index) {
  wait_barrier(&barrier, parity_of(index));
}

// Tells the producer that this warp has read a tile.
__device__ inline void release(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) arrive(&barrier);
}

// Goes through KV tiles [begin, upto) of a partial tile, for the group's rows. `first` is the place
// of the first of them in the rings.
template <typename Plan>
__device__ void attend_tiles(const PagedAttentionParams& p, int begin, int upto, int first,
                             const RowLengths& lengths, const Bf16* queries,
                             BalancedShared<Plan>& shared, BalancedSoftmax<Plan>& state) {
  const float scale = p.scale * kLog2E;
  const int32_t least = lengths.least();
  float scores[kScores], keep[2];
  BalancedWeights weights;
  const int last = first + upto - begin - 1;
  int32_t end = (begin + 1) * kTileKeys;

  wait_tile(shared.has_keys[stage_of(first)], first);
  warpgroup_settle(scores);
  warpgroup_begin();
  multiply_keys<Plan>(scores, queries, shared.keys[stage_of(first)]);
  warpgroup_wait_but<0>();
  warpgroup_settle(scores);
  release(shared.keys_read[stage_of(first)]);
  if (end > least) hide_scores(scores, lengths, end - kTileKeys);
  weigh_scores(scores, state, keep, scale);
  pack_weights(weights, scores);
  for (int index = first; index < last; ++index) {
    const int stage = stage_of(index), next = stage_of(index + 1);
    end += kTileKeys;
    wait_tile(shared.has_keys[next], index + 1);
    wait_tile(shared.has_values[stage], index);
    warpgroup_settle(scores);
    warpgroup_settle(state.sum);
    warpgroup_settle(weights);
    warpgroup_begin();
    multiply_keys<Plan>(scores, queries, shared.keys[next]);
    add_values(state, weights, shared.values[stage]);
    warpgroup_wait_but<1>();
    warpgroup_settle(scores);
    release(shared.keys_read[next]);
    if (end > least) hide_scores(scores, lengths, end - kTileKeys);
    weigh_scores(scores, state, keep, scale);
    warpgroup_wait_but<0>();
    warpgroup_settle(state.sum);
    warpgroup_settle(weights);
    release(shared.values_read[stage]);
    scale_sums(state, keep);
    pack_weights(weights, scores);
  }
  wait_tile(shared.has_values[stage_of(last)], last);
  warpgroup_settle(state.sum);
  warpgroup_settle(weights);
  warpgroup_begin();
  add_values(state, weights, shared.values[stage_of(last)]);
  warpgroup_wait_but<0>();
  warpgroup_settle(state.sum);
  release(shared.values_read[stage_of(last)]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.total[half] += __shfl_xor_sync(kFullWarp, state.total[half], 1);
    state.total[half] += __shfl_xor_sync(kFullWarp, state.total[half], 2);
  }
}

// Makes a row's sums NaN where it attends to a value that hide_values() has hidden.
template <typename Plan>
__device__ void spoil_sums(BalancedSoftmax<Plan>& state, const RowLengths& lengths,
                           const int32_t* poisoned) {
#pragma unroll
  for (int i = 0; i < Plan::kColumns * 4; ++i) {
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    if (poisoned[column] < lengths.of[i / 2 % 2]) state.sum[i] = NAN;
  }
}

}  // namespace photon::cuda
