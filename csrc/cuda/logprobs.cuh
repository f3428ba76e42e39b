// The log-probabilities of a row that asks for some: each CTA finds the likeliest of its ids, one a
// round, and the first CTA of the cluster merges these lists.
#pragma once
#include "common/logprobs.h"
#include "cuda/logits_row.cuh"
#include "cuda/row_reduce.cuh"

namespace photon::cuda {

struct LogprobShared {
  float sums[kMostBlocks];  // of exponentials, of each CTA; in the first one
  float log_sum;            // in the first one
  float scores[kMostBlocks][kMostLogprobs];
  float ids[kMostBlocks][kMostLogprobs];  // as the bits of floats
};

// The thread's best logit of those that come after `last` in order; none comes before all.
template <typename T>
__device__ Candidate best_after(const Row<T>& row, ThreadVectors share, const Candidate& last) {
  Candidate best;
  for (int32_t id = share.first; id < row.vocab; id += share.step) {
    const Candidate own = {to_float(row.logits[id]), id};
    if (!(own.score > -INFINITY) || (last.id >= 0 && !is_better(last, own))) continue;
    if (is_better(own, best)) best = own;
  }
  return best;
}

template <typename T>
__device__ float sum_of_exponentials(const Row<T>& row, ThreadVectors share, float top) {
  float sum = 0.0f;
  for (int32_t id = share.first; id < row.vocab; id += share.step) {
    const float logit = to_float(row.logits[id]);
    if (logit > -INFINITY) sum += expf(logit - top);
  }
  return sum;
}

// The likeliest ids of the CTA into its list in the first CTA.
template <int kBlocks, typename T>
__device__ void list_likeliest(const Row<T>& row, ThreadVectors share, Candidate own, int32_t count,
                               int part, RowShared& reduce, LogprobShared& shared) {
  for (int32_t i = 0; i < count; ++i) {
    const Candidate best = block_best(own, reduce);
    if (threadIdx.x == 0) {
      put_in_block<kBlocks>(&shared.scores[part][i], 0, best.score);
      put_in_block<kBlocks>(&shared.ids[part][i], 0, __int_as_float(best.id));
      reduce.best = best;
    }
    __syncthreads();
    const Candidate taken = reduce.best;
    if (own.id >= 0 && own.id == taken.id) own = best_after(row, share, taken);
  }
}

// The first warp of the first CTA: lane i walks down the list of CTA i.
template <int kBlocks>
__device__ void merge_likeliest(const Logprobs& logprobs, const LogprobShared& shared,
                                float log_sum) {
  const int lane = threadIdx.x;
  int next = 0;
  for (int32_t i = 0; i < logprobs.top; ++i) {
    Candidate own;
    if (lane < kBlocks && next < logprobs.top)
      own = {shared.scores[lane][next], __float_as_int(shared.ids[lane][next])};
    const Candidate best = warp_best(own);
    if (own.id >= 0 && own.id == best.id) ++next;
    if (lane == 0) logprobs.put_top(i, best.id, best.id < 0 ? -INFINITY : best.score - log_sum);
  }
}

// The log-probabilities of the likeliest ids into `logprobs`, and into the first CTA's shared
// memory what the sampled id's needs. The threads of all CTAs of the row call it, before the
// logits are changed.
template <typename T, int kBlocks>
__device__ __noinline__ void put_logprobs(const SampleParams& p, int64_t r, int part,
                                          RowShared& reduce, LogprobShared& shared) {
  const Logprobs logprobs = load_logprobs(p, r, load_segment(p.segments, r));
  const Row<T> row = row_of<T>(p, r);
  const ThreadVectors share = own_vectors<kBlocks>(part);
  const Candidate own = best_after(row, share, Candidate{});
  const float top = row_max<kBlocks>(own.score, reduce);
  const float sum = block_sum(sum_of_exponentials(row, share, top), reduce.value_of_warp);
  if (threadIdx.x == 0) put_in_block<kBlocks>(&shared.sums[part], 0, sum);
  __syncthreads();
  list_likeliest<kBlocks>(row, share, own, logprobs.top, part, reduce, shared);
  sync_row<kBlocks>();
  if (part != 0 || threadIdx.x >= kWarpSize) return;
  float total = 0.0f;
  for (int block = 0; block < kBlocks; ++block) total += shared.sums[block];
  const float log_sum = top + logf(total);
  if (threadIdx.x == 0) shared.log_sum = log_sum;
  merge_likeliest<kBlocks>(logprobs, shared, log_sum);
}

}  // namespace photon::cuda
