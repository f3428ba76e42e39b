// The log-probabilities of a row that asks for some: the likeliest ids are taken from a short list.
// Where too many ids are alike for it, each CTA finds the likeliest of its ids, one a round, and
// the first CTA of the cluster merges these.
#pragma once
#include "common/logprobs.h"
#include "common/noise.h"
#include "cuda/log2e.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sampling/adjusted_row.cuh"
#include "cuda/sampling/logits_row.cuh"
#include "cuda/sampling/row_reduce.cuh"
#include "cuda/sampling/short_list.cuh"

namespace photon::cuda {

// From a score to its log-probability.
struct LogSoftmax {
  float top, inverse, log_sum;  // the largest score, Noise::scale(), log of the sum beside it

  __device__ float of(float score) const { return (score - top) * inverse - log_sum; }
  // What the sum is of.
  __device__ float weight(float score) const {
    return exp2_approx((score - top) * (inverse * kLog2E));
  }
};

struct LogprobShared {
  float sums[kMostBlocks];  // of exponentials, of each piece; in the first one
  LogSoftmax softmax;       // in the first one
  float scores[kMostBlocks][kMostLogprobs];
  float ids[kMostBlocks][kMostLogprobs];  // as the bits of floats
};

// The thread's best score of those that come after `last` in order; none comes before all.
template <typename AnyRow>
__device__ Candidate best_after(const AnyRow& row, ThreadVectors share, const Candidate& last) {
  Candidate best;
  for (int32_t id = share.first; id < row.vocab; id += share.step) {
    const Candidate own = {row.score(to_float(row.logits[id]), id), id};
    if (!(own.score > -INFINITY) || (last.id >= 0 && !is_better(last, own))) continue;
    if (is_better(own, best)) best = own;
  }
  return best;
}

// Lists the ids whose score reaches the bound; returns the sum of the thread's exponentials.
template <int kBlocks, typename AnyRow>
__device__ float list_and_sum(const AnyRow& row, ThreadVectors share, const LogSoftmax& softmax,
                              float bound, const Listing<kBlocks>& listing) {
  float sum = 0.0f;
  const auto add = [&](float score) {
    if (score > -INFINITY) sum += softmax.weight(score);
  };
  for_scores(
      row, share,
      [&](const auto& v, int) {
        using V = std::decay_t<decltype(v)>;
        if (largest(v) >= bound) return false;
#pragma unroll
        for (int i = 0; i < V::kIds; ++i) add(to_float(v.of_id[i]));
        return true;
      },
      [&](int32_t id, float score) {
        add(score);
        if (score > -INFINITY && score >= bound) listing.put(id, score);
      });
  return sum;
}

// The first CTA: the likeliest of a list that holds all.
template <int kBlocks>
__device__ void put_listed(const Logprobs& logprobs, const Listing<kBlocks>& listing,
                           const LogSoftmax& softmax) {
  const Candidate own = listing.own();
  __syncthreads();
  const int32_t count = listing.count();
  int32_t place = own.id < 0 ? static_cast<int32_t>(threadIdx.x) : 0;
  for (int32_t i = 0; own.id >= 0 && i < count; ++i)
    place += is_better(listing.shared.candidates[i], own) ? 1 : 0;
  if (place < logprobs.top)
    logprobs.put_top(place, own.id, own.id < 0 ? -INFINITY : softmax.of(own.score));
}

// The likeliest ids of the CTA into its list in the first CTA.
template <int kBlocks, typename AnyRow>
__device__ void list_likeliest(const AnyRow& row, ThreadVectors share, Candidate own, int32_t count,
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
                                const LogSoftmax& softmax) {
  const int lane = threadIdx.x;
  int next = 0;
  for (int32_t i = 0; i < logprobs.top; ++i) {
    Candidate own;
    if (lane < kBlocks && next < logprobs.top)
      own = {shared.scores[lane][next], __float_as_int(shared.ids[lane][next])};
    const Candidate best = warp_best(own);
    if (own.id >= 0 && own.id == best.id) ++next;
    if (lane == 0) logprobs.put_top(i, best.id, best.id < 0 ? -INFINITY : softmax.of(best.score));
  }
}

// The exponentials of a row are summed up in this many pieces, each by 512 threads, whatever
// the cluster's size, so that the sum always has the same bits.
template <int kBlocks>
constexpr int kSumPieces = kBlocks > 1 ? kMostBlocks : 1;

// The log-probabilities of the likeliest ids into `logprobs`, and into the first CTA's shared
// memory what the sampled id's needs. The threads of all CTAs of the row call it; each gets what is
// best of its ids, by the first id of its vector where nothing is adjusted.
template <int kBlocks, typename AnyRow>
__device__ Candidate put_row_logprobs(const AnyRow& row, const Logprobs& logprobs, float inverse,
                                      int part, RowShared& reduce, ShortList& list,
                                      LogprobShared& shared) {
  constexpr int kOwn = kSumPieces<kBlocks> / kBlocks;
  const ThreadVectors share = own_vectors<kBlocks>(part);
  const Listing<kBlocks> listing{part, list};
  const Candidate seen = greedy_best(row, share);
  const float top = gather_groups<kBlocks>(seen.score, list);
  const float bound = kth_group(max(logprobs.top, 1), list);
  LogSoftmax softmax{top, inverse, 0.0f};
#pragma unroll 1
  for (int piece = part * kOwn; piece < (part + 1) * kOwn; ++piece) {
    const ThreadVectors own = own_vectors<kSumPieces<kBlocks>>(piece);
    const float sum =
        block_sum(list_and_sum(row, own, softmax, bound, listing), reduce.value_of_warp[piece % 2]);
    if (threadIdx.x == 0) put_in_block<kBlocks>(&shared.sums[piece], 0, sum);
  }
  const bool all_listed = listing.close();
  if (part == 0) {
    float total = 0.0f;
    for (int piece = 0; piece < kSumPieces<kBlocks>; ++piece) total += shared.sums[piece];
    softmax.log_sum = logf(total);
    if (threadIdx.x == 0) shared.softmax = softmax;
  }
  if (all_listed) {
    if (part == 0) put_listed(logprobs, listing, softmax);
    return seen;
  }
  const Candidate own = best_after(row, share, Candidate{});
  list_likeliest<kBlocks>(row, share, own, logprobs.top, part, reduce, shared);
  sync_row<kBlocks>();
  if (part == 0 && threadIdx.x < kWarpSize) merge_likeliest<kBlocks>(logprobs, shared, softmax);
  return seen;
}

// Of the logits of the row as planned, before they are changed; returns the best of these.
template <typename T, int kBlocks, typename Shared>
__device__ __noinline__ Candidate put_logprobs() {
  Shared& shared = shared_as<Shared>();
  return put_row_logprobs<kBlocks>(shared.plan.row(), shared.plan.logprobs, 1.0f,
                                   part_of_row<kBlocks>(), shared.reduce, shared.list,
                                   shared.logprobs);
}

// Of what is sampled of them.
template <typename T, int kBlocks, typename Shared>
__device__ __noinline__ void put_processed_logprobs() {
  Shared& shared = shared_as<Shared>();
  put_row_logprobs<kBlocks>(AdjustedRow<T>::of(shared), shared.plan.logprobs,
                            shared.plan.noise.scale(), part_of_row<kBlocks>(), shared.reduce,
                            shared.list, shared.logprobs);
}

}  // namespace photon::cuda
