// What a row is sampled by, in the shared memory of each of its CTAs, so that no thread keeps it.
#pragma once
#include "common/filter.h"
#include "common/logprobs.h"
#include "common/minimum_tokens.h"
#include "common/noise.h"
#include "common/penalties.h"
#include "common/segment.h"
#include "cuda/sampling/logits_row.cuh"

namespace photon::cuda {

template <typename T>
struct RowPlan {
  T* logits;
  int32_t vocab;
  Noise noise;
  Filter filter;
  Adjustment adjustment;
  Logprobs logprobs;
  const int32_t* stop_ids;
  int64_t num_suppressed;  // leading stop ids that are suppressed

  __device__ Row<T> row() const { return {logits, vocab}; }
  // The logit that is largest is taken, as it is.
  __device__ bool is_plain() const { return noise.greedy() && !adjustment.on(); }
};

// All threads of the CTA call it. Inlined into the kernel, where params are constants.
template <typename T>
__device__ __forceinline__ void plan_row(RowPlan<T>& plan, const SampleParams& p, int64_t r,
                                         const Segment& s) {
  if (threadIdx.x == 0) {
    plan.logits = static_cast<T*>(p.logits) + r * p.logits_stride;
    plan.vocab = static_cast<int32_t>(p.vocab);
    plan.noise = load_noise(s, p.row_state);
    plan.filter = load_filter(s, p.row_state);
    plan.adjustment = load_adjustment(p, s.row);
    plan.logprobs = load_logprobs(p, r, s);
    plan.stop_ids = row_words(p.stop_ids, s.row);
    plan.num_suppressed = num_suppressed_stops(p, s);
  }
  __syncthreads();
}

}  // namespace photon::cuda
