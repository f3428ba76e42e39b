// The end of a partial tile in balanced_attention: outputs, where it is whole; else sums that
// are left in the workspace, which the last CTA to come adds up, in order. The two consumers of a
// CTA do so apart, each for its own rows.
#pragma once
#include "common/balanced_parts.h"
#include "cuda/attention/balanced_softmax.cuh"

namespace photon::cuda {

// A slot of the workspace, of a partial tile.
template <typename Plan>
class Slot {
 public:
  __device__ Slot(float* workspace, int number)
      : words_(workspace + number * balanced_slot_words(Plan::kHeadDim)) {}

  // Of the group.
  __device__ unsigned* counter() const { return reinterpret_cast<unsigned*>(words_) + own_group(); }

  // A thread's sums: vectors of four, a column of vectors for each thread.
  __device__ float4* sums() const {
    return reinterpret_cast<float4*>(words_ + kBalancedCounters) + static_cast<int>(threadIdx.x) -
           kWarpgroupThreads;
  }

  // The highest score and the sum of weights of the thread's rows, the second 8 rows later.
  __device__ float2* weights() const {
    return reinterpret_cast<float2*>(words_ + kBalancedCounters + kTileRows * Plan::kHeadDim) +
           own_row();
  }

 private:
  float* words_;
};

// The slots of a call. A CTA has two: that of a query tile that begins in its range and is cut, and
// that of one that began in an earlier range. Of an exact step, each part that is spread has
// one, and behind these each CTA one for what it adds up by itself.
template <typename Plan>
class Workspace {
 public:
  __device__ explicit Workspace(const PagedAttentionParams& p)
      : words_(p.workspace), kv_heads_(static_cast<int>(p.kv_heads)) {}

  // Of a query tile's partial tile number `index`.
  __device__ Slot<Plan> of(const PartialTile& partial, int index) const {
    const int first = partial.first;
    return {words_, Plan::kIsExact ? first + index * kv_heads_ : 2 * (first + index) + (index > 0)};
  }

  // The number of the CTA's partial tile.
  __device__ int own_index(const PartialTile& partial) const {
    return Plan::kIsExact ? part_of(partial.begin) : static_cast<int>(blockIdx.x) - partial.first;
  }

  __device__ Slot<Plan> own() const {
    return {words_, static_cast<int>(gridDim.x * kSpreadSlots + blockIdx.x)};
  }

 private:
  float* words_;
  int kv_heads_;
};

template <typename Plan>
__device__ void leave_partial(const Slot<Plan>& slot, const BalancedSoftmax<Plan>& state) {
  float4* const sums = slot.sums();
#pragma unroll
  for (int n = 0; n < Plan::kColumns; ++n) {
    sums[n * kConsumers * kWarpgroupThreads] = {state.sum[4 * n], state.sum[4 * n + 1],
                                                state.sum[4 * n + 2], state.sum[4 * n + 3]};
  }
  if (threadIdx.x % 4 != 0) return;
  float2* const weights = slot.weights();
  weights[0] = {state.high[0], state.total[0]};
  weights[8] = {state.high[1], state.total[1]};
}

__device__ inline float4 load_fresh(const float4* pointer) {
  const uint4 bits = load_fresh_if(true, reinterpret_cast<const uint4*>(pointer));
  float4 v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}

__device__ inline float2 load_fresh(const float2* pointer) {
  const int32_t* words = reinterpret_cast<const int32_t*>(pointer);
  return {__int_as_float(load_fresh(words)), __int_as_float(load_fresh(words + 1))};
}

// By what sums are multiplied whose highest score is `own`, beside others; of all, `high` is the
// highest. Exact: what is added to nothing, and what nothing is added to, stays as it is to the
// bit. So a part in which a row sees no position changes none of its bits.
template <typename Plan>
__device__ float weight_among(float own, float high, float scale) {
  const float base = high == -INFINITY ? 0.0f : high * scale;
  return Plan::kIsExact && own == high ? 1.0f : exp2_approx(fmaf(own, scale, -base));
}

// Adds the partial tile of a slot to what is summed already; kIsBefore: the other way round.
template <bool kIsBefore, typename Plan>
__device__ void add_partial(const Slot<Plan>& slot, float scale, BalancedSoftmax<Plan>& state) {
  const float4* const sums = slot.sums();
  float keep[2], gain[2];  // of what comes first, and of what is added to it
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 left = load_fresh(slot.weights() + half * 8),
                 own = {state.high[half], state.total[half]}, first = kIsBefore ? left : own,
                 second = kIsBefore ? own : left;
    const float high = fmaxf(first.x, second.x);
    keep[half] = weight_among<Plan>(first.x, high, scale);
    gain[half] = weight_among<Plan>(second.x, high, scale);
    state.high[half] = high;
    state.total[half] = fmaf(first.y, keep[half], second.y * gain[half]);
  }
#pragma unroll
  for (int n = 0; n < Plan::kColumns; ++n) {
    const float4 loaded = load_fresh(sums + n * kConsumers * kWarpgroupThreads);
    const float left[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = state.sum[4 * n + i];
      const float first = kIsBefore ? left[i] : sum, second = kIsBefore ? sum : left[i];
      sum = fmaf(first, keep[i / 2], second * gain[i / 2]);
    }
  }
}

// Leaves the CTA's partial tile, and returns whether all others are there, too; then `state`
// is made of all.
template <typename Plan>
__device__ bool merge_partials(const PagedAttentionParams& p, const PartialTile& partial,
                               BalancedShared<Plan>& shared, BalancedSoftmax<Plan>& state) {
  const Workspace<Plan> workspace(p);
  const int barrier = kConsumerBarrier + own_group();
  leave_partial(workspace.of(partial, workspace.own_index(partial)), state);
  sync_threads(barrier, kWarpgroupThreads);
  int32_t& is_last = shared.is_last[own_group()];
  if (threadIdx.x % kWarpgroupThreads == 0) {
    const unsigned last = partial.count - 1;
    is_last = count_round(workspace.of(partial, 0).counter(), last) == last;
  }
  sync_threads(barrier, kWarpgroupThreads);
  const bool merges = is_last != 0;
  if (!merges) return false;
  state = {};
  for (int i = 0; i < partial.count; ++i)
    add_partial<false>(workspace.of(partial, i), p.scale * kLog2E, state);
  return true;
}

// Exact: infinity is NaN, for of a query tile with other tokens hide_values() would have hidden
// what it comes from.
template <typename Plan>
__device__ float output_of(float value) {
  return Plan::kIsExact ? fmaf(value, 0.0f, value) : value;
}

// Turns the sums of the group's rows into outputs. They go by way of the rows' queries in shared
// memory, which all of the group have read.
template <typename Plan>
__device__ void store_rows(const PagedAttentionParams& p, const PartialTile& partial, int sharers,
                           const BalancedSoftmax<Plan>& state, Bf16* staged) {
  const int lane = threadIdx.x % kWarpSize, pair = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = state.total[half], inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int n = 0; n < Plan::kColumns; ++n) {
      const float* const sums = state.sum + 4 * n + 2 * half;
      *reinterpret_cast<uint32_t*>(staged + Plan::place(own_row() + half * 8, n) + pair) =
          pack_bf16(output_of<Plan>(sums[0] * inverse), output_of<Plan>(sums[1] * inverse));
    }
  }
  __syncwarp();
  const int vector = lane % Plan::kVectors, first = own_row() - lane / 4 + lane / Plan::kVectors;
  Bf16* const to = static_cast<Bf16*>(p.out) + partial.first_token * p.out_stride +
                   partial.kv_head * sharers * p.out_head_stride + vector * 8;
  QueryRow row(first, Plan::kStepRows, sharers);
#pragma unroll
  for (int i = 0; i < 16; i += Plan::kStepRows, row.advance()) {
    if (row.token >= partial.tokens) break;
    *reinterpret_cast<uint4*>(to + row.token * p.out_stride + row.head * p.out_head_stride) =
        *reinterpret_cast<const uint4*>(staged + Plan::place(first + i, vector));
  }
}

// Turns the sums of partial tile `number` into outputs, where no other CTA has to, and gives its
// queries' place back.
template <typename Plan>
__device__ void finish_partial(const PagedAttentionParams& p, const PartialTile& partial,
                               const RowLengths& lengths, int sharers, int number,
                               BalancedShared<Plan>& shared, BalancedSoftmax<Plan>& state) {
  const int32_t* const poisoned = shared.poisoned[number % 2];
  if (poisoned[Plan::kHeadDim] != INT_MAX) spoil_sums(state, lengths, poisoned);
  sync_threads(kConsumerBarrier + own_group(), kWarpgroupThreads);  // all have read the queries
  if (partial.is_whole() || merge_partials(p, partial, shared, state))
    store_rows(p, partial, sharers, state, shared.queries[number % 2]);
  arrive(&shared.queries_read[number % 2]);
}

}  // namespace photon::cuda
