// The end of a part of a context in even_attention: outputs, where it is the whole; else sums that
// are left in the workspace, which the last CTA to come adds up, in order. The two consumers of a
// CTA do so apart, each for its own rows.
#pragma once
#include "cuda/attention/even_softmax.cuh"

namespace photon::cuda {

// What a CTA has in the workspace: a counter for each consumer, of the parts of the context that
// begins in its share and is cut; the sums of the part that began in an earlier share; and those
// of the part that goes on in a later one.
template <typename Plan>
class Workspace {
 public:
  static constexpr int64_t kPart = even_part_words(Plan::kHeadDim),
                           kWords = chunk_workspace_words(Plan::kHeadDim, 1);

  __device__ explicit Workspace(float* first) : words_(first) {}

  __device__ unsigned* counter(int cta) const {
    return reinterpret_cast<unsigned*>(words_ + cta * kWords) + own_group();
  }

  // A thread's sums: vectors of four, a column of vectors for each thread.
  __device__ float4* sums(int cta, bool begins) const {
    return reinterpret_cast<float4*>(part(cta, begins)) + static_cast<int>(threadIdx.x) -
           kWarpgroupThreads;
  }

  // The highest score and the sum of weights of the thread's rows, the second 8 rows later.
  __device__ float2* weights(int cta, bool begins) const {
    return reinterpret_cast<float2*>(part(cta, begins) + kTileRows * Plan::kHeadDim) + own_row();
  }

 private:
  __device__ float* part(int cta, bool begins) const {
    return words_ + cta * kWords + kEvenCounters + begins * kPart;
  }

  float* words_;
};

template <typename Plan>
__device__ void leave_part(const Workspace<Plan>& workspace, int cta, bool begins,
                           const EvenSoftmax<Plan>& state) {
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

// Adds the part that a CTA has left to what is summed already.
template <typename Plan>
__device__ void add_part(const Workspace<Plan>& workspace, int cta, bool begins, float scale,
                         EvenSoftmax<Plan>& state) {
  const float4* const sums = workspace.sums(cta, begins);
  float keep[2], gain[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 part = load_fresh(workspace.weights(cta, begins) + half * 8);
    const float high = fmaxf(state.high[half], part.x),
                base = high == -INFINITY ? 0.0f : high * scale;
    keep[half] = exp2_approx(fmaf(state.high[half], scale, -base));
    gain[half] = exp2_approx(fmaf(part.x, scale, -base));
    state.high[half] = high;
    state.total[half] = fmaf(state.total[half], keep[half], part.y * gain[half]);
  }
#pragma unroll
  for (int n = 0; n < Plan::kColumns; ++n) {
    const float4 part = load_fresh(sums + n * kConsumers * kWarpgroupThreads);
    const float own[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = state.sum[4 * n + i];
      sum = fmaf(sum, keep[i / 2], own[i] * gain[i / 2]);
    }
  }
}

// Leaves the CTA's part of a context, and returns whether all others are there, too; then `state`
// is made of all.
template <typename Plan>
__device__ bool merge_parts(const PagedAttentionParams& p, const Part& part,
                            EvenShared<Plan>& shared, EvenSoftmax<Plan>& state) {
  const Workspace<Plan> workspace(p.workspace);
  const int cta = static_cast<int>(blockIdx.x), barrier = kConsumerBarrier + own_group();
  leave_part(workspace, cta, part.begin == 0, state);
  sync_threads(barrier, kWarpgroupThreads);
  int32_t& is_last = shared.is_last[own_group()];
  if (threadIdx.x % kWarpgroupThreads == 0) {
    const unsigned last = part.count - 1;
    is_last = count_round(workspace.counter(part.first_cta), last) == last;
  }
  sync_threads(barrier, kWarpgroupThreads);
  const bool merges = is_last != 0;
  if (!merges) return false;
  state = {};
  for (int i = 0; i < part.count; ++i)
    add_part(workspace, part.first_cta + i, i == 0, p.scale * kLog2E, state);
  return true;
}

// Turns the sums of the group's rows into outputs. They go by way of the rows' queries in shared
// memory, which all of the group have read.
template <typename Plan>
__device__ void store_rows(const PagedAttentionParams& p, const Part& part, int sharers,
                           const EvenSoftmax<Plan>& state, Bf16* staged) {
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
  Bf16* const to = static_cast<Bf16*>(p.out) + part.first_token * p.out_stride +
                   part.kv_head * sharers * p.out_head_stride + vector * 8;
  QueryRow row(first, Plan::kStepRows, sharers);
#pragma unroll
  for (int i = 0; i < 16; i += Plan::kStepRows, row.advance()) {
    if (row.token >= part.tokens) break;
    *reinterpret_cast<uint4*>(to + row.token * p.out_stride + row.head * p.out_head_stride) =
        *reinterpret_cast<const uint4*>(staged + Plan::place(first + i, vector));
  }
}

// The consumers: two warpgroups, each with half of the rows of every part of the share.
template <typename Plan>
__device__ void consume(const PagedAttentionParams& p, const StepTokens& tokens, Share share,
                        EvenShared<Plan>& shared) {
  wait_for_earlier();
  Part part;
  for (int number = 0, index = 0; share.next(part); ++number) {
    const RowLengths lengths(tokens, part);
    Bf16* const queries = shared.queries[number % 2];
    EvenSoftmax<Plan> state;
    wait_barrier(&shared.has_queries[number % 2], parity_of(number));
    fence_async_shared();  // threads have copied them
    attend_part(p, part, lengths, queries, index, shared, state);
    index += part.end - part.begin;
    const int32_t* const poisoned = shared.poisoned[number % 2];
    if (poisoned[Plan::kHeadDim] != INT_MAX) spoil_sums(state, lengths, poisoned);
    sync_threads(kConsumerBarrier + own_group(), kWarpgroupThreads);  // all have read the queries
    if (part.is_whole() || merge_parts(p, part, shared, state))
      store_rows(p, part, tokens.sharers, state, queries);
    arrive(&shared.queries_read[number % 2]);
  }
}

}  // namespace photon::cuda
