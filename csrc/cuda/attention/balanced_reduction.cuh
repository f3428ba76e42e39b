// The end of a partial tile in balanced_attention: outputs, where it is whole; else sums that
// are left in the workspace, which the last CTA to come adds up, in order. The two consumers of a
// CTA do so apart, each for its own rows.
#pragma once
#include "cuda/attention/balanced_softmax.cuh"

namespace photon::cuda {

// What a CTA has in the workspace: a counter for each consumer, of the partial tiles of the query
// tile that begins in its range and is cut; the sums of the partial tile of one that began in an
// earlier range; and those of one that goes on in a later range.
template <typename Plan>
class Workspace {
 public:
  static constexpr int64_t kPartialWords = balanced_partial_words(Plan::kHeadDim),
                           kWords = chunk_workspace_words(Plan::kHeadDim, 1);

  __device__ explicit Workspace(float* first) : words_(first) {}

  __device__ unsigned* counter(int cta) const {
    return reinterpret_cast<unsigned*>(words_ + cta * kWords) + own_group();
  }

  // A thread's sums: vectors of four, a column of vectors for each thread.
  __device__ float4* sums(int cta, bool begins) const {
    return reinterpret_cast<float4*>(partial(cta, begins)) + static_cast<int>(threadIdx.x) -
           kWarpgroupThreads;
  }

  // The highest score and the sum of weights of the thread's rows, the second 8 rows later.
  __device__ float2* weights(int cta, bool begins) const {
    return reinterpret_cast<float2*>(partial(cta, begins) + kTileRows * Plan::kHeadDim) + own_row();
  }

 private:
  __device__ float* partial(int cta, bool begins) const {
    return words_ + cta * kWords + kBalancedCounters + begins * kPartialWords;
  }

  float* words_;
};

template <typename Plan>
__device__ void leave_partial(const Workspace<Plan>& workspace, int cta, bool begins,
                              const BalancedSoftmax<Plan>& state) {
  float4* const sums = workspace.sums(cta, begins);
#pragma unroll
  for (int n = 0; n < Plan::kColumns; ++n) {
    sums[n * kConsumers * kWarpgroupThreads] = {state.sum[4 * n], state.sum[4 * n + 1],
                                                state.sum[4 * n + 2], state.sum[4 * n + 3]};
  }
  if (threadIdx.x % 4 != 0) return;
  float2* const weights = workspace.weights(cta, begins);
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

// Adds the partial tile that a CTA has left to what is summed already.
template <typename Plan>
__device__ void add_partial(const Workspace<Plan>& workspace, int cta, bool begins, float scale,
                            BalancedSoftmax<Plan>& state) {
  const float4* const sums = workspace.sums(cta, begins);
  float keep[2], gain[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 partial = load_fresh(workspace.weights(cta, begins) + half * 8);
    const float high = fmaxf(state.high[half], partial.x),
                base = high == -INFINITY ? 0.0f : high * scale;
    keep[half] = exp2_approx(fmaf(state.high[half], scale, -base));
    gain[half] = exp2_approx(fmaf(partial.x, scale, -base));
    state.high[half] = high;
    state.total[half] = fmaf(state.total[half], keep[half], partial.y * gain[half]);
  }
#pragma unroll
  for (int n = 0; n < Plan::kColumns; ++n) {
    const float4 partial = load_fresh(sums + n * kConsumers * kWarpgroupThreads);
    const float own[4] = {partial.x, partial.y, partial.z, partial.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = state.sum[4 * n + i];
      sum = fmaf(sum, keep[i / 2], own[i] * gain[i / 2]);
    }
  }
}

// Leaves the CTA's partial tile, and returns whether all others are there, too; then `state`
// is made of all.
template <typename Plan>
__device__ bool merge_partials(const PagedAttentionParams& p, const PartialTile& partial,
                               BalancedShared<Plan>& shared, BalancedSoftmax<Plan>& state) {
  const Workspace<Plan> workspace(p.workspace);
  const int cta = static_cast<int>(blockIdx.x), barrier = kConsumerBarrier + own_group();
  leave_partial(workspace, cta, partial.begin == 0, state);
  sync_threads(barrier, kWarpgroupThreads);
  int32_t& is_last = shared.is_last[own_group()];
  if (threadIdx.x % kWarpgroupThreads == 0) {
    const unsigned last = partial.count - 1;
    is_last = count_round(workspace.counter(partial.first_cta), last) == last;
  }
  sync_threads(barrier, kWarpgroupThreads);
  const bool merges = is_last != 0;
  if (!merges) return false;
  state = {};
  for (int i = 0; i < partial.count; ++i)
    add_partial(workspace, partial.first_cta + i, i == 0, p.scale * kLog2E, state);
  return true;
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
      *reinterpret_cast<uint32_t*>(staged + Plan::place(own_row() + half * 8, n) + pair) =
          pack_bf16(state.sum[4 * n + 2 * half] * inverse,
                    state.sum[4 * n + 2 * half + 1] * inverse);
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

// The consumers: two warpgroups, each with half of the rows of every partial tile of the range,
// `partial` and those behind it.
template <typename Plan>
__device__ void consume(const PagedAttentionParams& p, const StepTokens& tokens,
                        PartialTile partial, CtaRange range, BalancedShared<Plan>& shared) {
  wait_for_earlier();
  for (int number = 0, index = 0; partial.is_there(); range.next(partial), ++number) {
    const RowLengths lengths(tokens, partial);
    Bf16* const queries = shared.queries[number % 2];
    BalancedSoftmax<Plan> state;
    wait_barrier(&shared.has_queries[number % 2], parity_of(number));
    fence_async_shared();  // threads have copied them
    attend_partial(p, partial, lengths, queries, index, shared, state);
    index += partial.end - partial.begin;
    const int32_t* const poisoned = shared.poisoned[number % 2];
    if (poisoned[Plan::kHeadDim] != INT_MAX) spoil_sums(state, lengths, poisoned);
    sync_threads(kConsumerBarrier + own_group(), kWarpgroupThreads);  // all have read the queries
    if (partial.is_whole() || merge_partials(p, partial, shared, state))
      store_rows(p, partial, tokens.sharers, state, queries);
    arrive(&shared.queries_read[number % 2]);
  }
}

}  // namespace photon::cuda
