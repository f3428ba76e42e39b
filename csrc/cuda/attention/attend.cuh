// Attention of one token over its paged context, for a tile of query heads that share a KV head, by
// one CTA.
//
// The CTA is cut into groups of kLanes lanes, kLanes * 8 >= head_dim. Group g takes the positions
// g, g + groups, g + 2 * groups, ... with an online softmax of its own; then the groups are merged
// in order in shared memory. Which group takes a position, and in which order it adds it, depends
// on head_dim and the position alone: a token's result never depends on the step it rides in.
// (Products that are added are written as fmaf: what the compiler contracts could otherwise differ
// from one instance of a kernel to the next.)
#pragma once
#include <cmath>

#include <type_traits>

#include "common/kv.h"
#include "cuda/attention/kv_pack.cuh"
#include "cuda/element.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kAttendThreads = 256;
constexpr int kAttendWarps = kAttendThreads / kWarpSize;

// Whether keys and values have scales, which products and weights are multiplied by.
template <typename Kv>
constexpr bool kScaled = std::is_same_v<Kv, E4m3>;

// Kv: what keys and values are.
template <typename T, typename Kv, int kLanes, int kHeads>
struct AttendShared {
  static constexpr int kGroups = kAttendThreads / kLanes;
  static constexpr int kDims = kLanes * kPack;

  alignas(16) T q[kHeads][kDims];  // zeros past head_dim
  alignas(16) Kv
      new_k[kDims];  // the token's own key and value, where they are not to be read from the cache
  alignas(16) Kv new_v[kDims];
  float new_k_scale, new_v_scale;      // where kScaled
  float sums[kGroups][kHeads][kDims];  // of exp(score - high) * v
  float highs[kGroups][kHeads];  // the highest score; once merged, the group's weight in the result
  float weights[kGroups][kHeads];  // sum of exp(score - high)
  float totals[kHeads];
};

// What one lane holds of its group's online softmax.
template <int kHeads>
struct LaneSoftmax {
  float high[kHeads], weight[kHeads], sum[kHeads][kPack];

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      high[h] = -INFINITY;
      weight[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[h][i] = 0.0f;
    }
  }
};

// exp(score - high), where -inf scores weigh nothing even if no score was finite yet.
__device__ inline float weight_of(float score, float high) {
  return score == -INFINITY ? 0.0f : expf(score - high);
}

// Values of a few positions.
template <typename Kv, bool kVector, int kPositions>
struct LaneValues {
  decltype(load_kv<kVector>(static_cast<const Kv*>(nullptr), 0)) packs[kPositions];
  float scales[kPositions];  // where kScaled
};

// Adds a few positions, -inf scores being absent ones, to one head's softmax.
template <typename Kv, bool kVector, int kHeads, int kPositions>
__device__ inline void add_positions(LaneSoftmax<kHeads>& state, int h,
                                     const float (&scores)[kPositions],
                                     const LaneValues<Kv, kVector, kPositions>& v) {
  float high = state.high[h];
#pragma unroll
  for (int u = 0; u < kPositions; ++u) high = fmaxf(high, scores[u]);
  const float keep = weight_of(state.high[h], high);
  state.high[h] = high;
  float added = 0.0f;
#pragma unroll
  for (int i = 0; i < kPack; ++i) state.sum[h][i] *= keep;
#pragma unroll
  for (int u = 0; u < kPositions; ++u) {
    const float weight = weight_of(scores[u], high);
    added += weight;
    const float factor = kScaled<Kv> ? weight * v.scales[u] : weight;
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      state.sum[h][i] = fmaf(factor, kv_number(v.packs[u], i), state.sum[h][i]);
  }
  state.weight[h] = fmaf(state.weight[h], keep, added);
}

// What attention needs to know of the op; `new_position` is the position whose k and v are in
// shared memory, -1 if none is.
struct AttendTask {
  Token token;
  int64_t kv_head;
  int32_t new_position;
  int head_dim;
  float scale;
};

// One CTA-wide pass over the context. All threads must call it, after a barrier behind the writes
// of shared.q and shared.new_*.
template <typename T, typename Kv, int kLanes, int kHeads, bool kVector>
__device__ void scan_context(const KvCache& cache, const AttendTask& task,
                             const AttendShared<T, Kv, kLanes, kHeads>& shared,
                             LaneSoftmax<kHeads>& state) {
  constexpr int kGroups = AttendShared<T, Kv, kLanes, kHeads>::kGroups;
  constexpr int kAhead = 4;  // positions of a group in flight
  const int group = threadIdx.x / kLanes, d = threadIdx.x % kLanes * kPack;
  const int dims = task.head_dim - d;
  float q[kHeads][kPack];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) q[h][i] = to_float(shared.q[h][d + i]) * task.scale;
  }
  state.clear();
  for (int64_t base = 0; base < task.token.length; base += kAhead * kGroups) {
    LaneValues<Kv, kVector, kAhead> v;
    bool present[kAhead];
    float scores[kHeads][kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t position = base + u * kGroups + group;
      KvPlace place = {-1, 0};
      if (position < task.token.length)
        place = find_place(cache, task.token.row, static_cast<int32_t>(position));
      present[u] = place.page >= 0;
      const bool is_new = position == task.new_position;
      const Kv* k_token =
          is_new ? shared.new_k
                 : static_cast<const Kv*>(cache.k) + place.k_offset(cache, task.kv_head);
      const Kv* v_token =
          is_new ? shared.new_v
                 : static_cast<const Kv*>(cache.v) + place.v_offset(cache, task.kv_head);
      const auto k = load_kv<kVector>(k_token + d, present[u] ? dims : 0);
      v.packs[u] = load_kv<kVector>(v_token + d, present[u] ? dims : 0);
      float k_scale = 1.0f;
      if constexpr (kScaled<Kv>) {
        v.scales[u] = 0.0f;
        if (present[u]) {
          k_scale =
              is_new ? shared.new_k_scale : cache.scales[place.k_scale_offset(cache, task.kv_head)];
          v.scales[u] =
              is_new ? shared.new_v_scale : cache.scales[place.v_scale_offset(cache, task.kv_head)];
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kPack; ++i) dot = fmaf(q[h][i], kv_number(k, i), dot);
        scores[h][u] = kScaled<Kv> ? dot * k_scale : dot;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const float score = warp_sum<kLanes>(scores[h][u]);
        scores[h][u] = present[u] ? score : -INFINITY;
      }
      add_positions(state, h, scores[h], v);
    }
  }
}

// Merges the groups and writes the heads: out[h * out_stride + d] for h < heads. All threads must
// call it.
template <typename T, typename Kv, int kLanes, int kHeads>
__device__ void merge_groups(AttendShared<T, Kv, kLanes, kHeads>& shared,
                             const LaneSoftmax<kHeads>& state, T* out, int64_t out_stride,
                             int heads, int head_dim) {
  constexpr int kGroups = AttendShared<T, Kv, kLanes, kHeads>::kGroups;
  const int group = threadIdx.x / kLanes, d = threadIdx.x % kLanes * kPack;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) shared.sums[group][h][d + i] = state.sum[h][i];
    if (d != 0) continue;
    shared.highs[group][h] = state.high[h];
    shared.weights[group][h] = state.weight[h];
  }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    const int h = threadIdx.x;
    float high = -INFINITY, total = 0.0f;
    for (int g = 0; g < kGroups; ++g) high = fmaxf(high, shared.highs[g][h]);
    for (int g = 0; g < kGroups; ++g) {
      shared.highs[g][h] = weight_of(shared.highs[g][h], high);
      total = fmaf(shared.highs[g][h], shared.weights[g][h], total);
    }
    shared.totals[h] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * head_dim; i += kAttendThreads) {
    const int h = i / head_dim, at = i % head_dim;
    float sum = 0.0f;
    for (int g = 0; g < kGroups; ++g) sum = fmaf(shared.highs[g][h], shared.sums[g][h][at], sum);
    out[h * out_stride + at] =
        from_float<T>(shared.totals[h] == 0.0f ? 0.0f : sum / shared.totals[h]);
  }
}

}  // namespace photon::cuda
