// The sampler: from a row's logits to its token, by one CTA or by a cluster.
#pragma once
#include <cmath>

#include "common/filter.h"
#include "common/logprobs.h"
#include "common/minimum_tokens.h"
#include "common/noise.h"
#include "common/out_record.h"
#include "common/penalties.h"
#include "common/philox.h"
#include "common/segment.h"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sampling/adjusted_row.cuh"
#include "cuda/sampling/automaton.cuh"
#include "cuda/sampling/filter.cuh"
#include "cuda/sampling/logits_row.cuh"
#include "cuda/sampling/logprobs.cuh"
#include "cuda/sampling/row_reduce.cuh"
#include "cuda/sampling/sample_rows.h"
#include "cuda/sampling/short_list.cuh"

namespace photon::cuda {

constexpr int kSampleCluster =
    8;  // CTAs that share a row in the Hopper kernel: one alone cannot load fast enough
constexpr int kManyRowsCluster = 2;   // the same of many rows, which keep all SMs busy
constexpr int64_t kClusterRows = 96;  // more are many
constexpr int kPhiloxIds = 4;         // ids that share one Philox block

// CTAs that an SM has registers for. 32 rows take two of each; a third, where nothing spills for
// it, is for clusters that fit nowhere else.
template <typename T>
constexpr int kSampleResident = sizeof(T) == 2 ? 3 : 2;

// What a row is sampled by, in the shared memory of each of its CTAs, so that no thread keeps it.
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

// A CTA's shared memory.
template <typename T, int kBlocks>
struct SampleShared {
  RowPlan<T> plan;
  RowShared reduce;
  float score_of_block[kBlocks],  // the best of each CTA, in the first one
      id_of_block[kBlocks];       // an id as the bits of a float
  LogprobShared logprobs;
  HiddenIds<kBlocks> hidden;
  union {  // first the one, then perhaps the other
    ShortList list;
    FilterSearch search;
  };
};

// The first warp's result in the first CTA is the cluster's. All threads of the cluster must call
// it.
template <typename T, int kBlocks>
__device__ Candidate cluster_best(Candidate best, SampleShared<T, kBlocks>& shared) {
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    store_in_block(&shared.score_of_block[rank], 0, best.score);
    store_in_block(&shared.id_of_block[rank], 0, __int_as_float(best.id));
  }
  sync_cluster();
  if (rank != 0) return best;
  for (int block = 1; block < kBlocks; ++block) {
    const Candidate other = {shared.score_of_block[block],
                             __float_as_int(shared.id_of_block[block])};
    if (is_better(other, best)) best = other;
  }
  return best;
}

// The lowest id of a vector whose logit is best.score; best.id is the vector's first. All lanes of
// a warp must call it, and get it.
template <typename T>
__device__ int32_t first_equal(const Row<T>& row, const Candidate& best) {
  const int lane = threadIdx.x % kWarpSize;
  const bool is_here = lane < Vector<T>::kIds && lane < row.vocab - best.id &&
                       to_float(row.logits[best.id + lane]) == best.score;
  return best.id + __ffs(__ballot_sync(kFullWarp, is_here)) - 1;
}

__device__ inline float gumbel(uint32_t bits) { return -logf(-logf(open_uniform(bits))); }

// Takes the best of the four ids of a Philox block, from `first` on, if it is better than `best`.
// NaN and -inf are no candidates: both fail `v > -inf`.
__device__ inline void take_of_four(Candidate& best, const float (&scores)[kPhiloxIds],
                                    int32_t first, const Noise& noise) {
  // The lanes of token_bits(), four at a time.
  const Philox4 bits =
      philox4x32({{static_cast<uint32_t>(first / kPhiloxIds), noise.position, 0u, 0u}},
                 noise.seed_low, noise.seed_high);
#pragma unroll
  for (int i = 0; i < kPhiloxIds; ++i) {
    if (!(scores[i] > -INFINITY)) continue;
    const Candidate candidate = {noise.scaled(scores[i]) + gumbel(bits.v[i]), first + i};
    if (is_better(candidate, best)) best = candidate;
  }
}

// The noise takes far longer than the loads, which are one id at a time.
template <typename T>
__device__ Candidate noisy_best(const Row<T>& row, ThreadVectors share, const Noise& noise) {
  Candidate best;
  for (int first = share.first * kPhiloxIds; first < row.vocab; first += share.step * kPhiloxIds) {
    float scores[kPhiloxIds];
#pragma unroll
    for (int i = 0; i < kPhiloxIds; ++i)
      scores[i] = i < row.vocab - first ? to_float(row.logits[first + i]) : -INFINITY;
    take_of_four(best, scores, first, noise);
  }
  return best;
}

// The same of a row whose vectors are the thread's own.
template <typename AnyRow>
__device__ Candidate noisy_best(const AnyRow& row, ThreadVectors share, const Noise& noise) {
  constexpr int kIds = Vector<typename AnyRow::Element>::kIds;
  Candidate best;
#pragma unroll 1
  for (int vector = share.first; vector * kIds < row.vocab; vector += share.step) {
    const uint32_t hidden = row.hidden_ids(vector);
    const bool adjusts = row.adjusts(vector);
#pragma unroll 1
    for (int from = 0; from < kIds; from += kPhiloxIds) {
      const int32_t first = vector * kIds + from;
      float scores[kPhiloxIds];
#pragma unroll
      for (int i = 0; i < kPhiloxIds; ++i) {
        const bool is_there = i < row.vocab - first && (hidden >> (from + i) & 1u) == 0;
        scores[i] = is_there ? to_float(row.logits[first + i]) : -INFINITY;
        if (adjusts && is_there) scores[i] = row.score(scores[i], first + i);
      }
      take_of_four(best, scores, first, noise);
    }
  }
  row.score_hidden();
  row.for_hidden([&](int32_t id, float score) {
    if (!(score > -INFINITY)) return;
    const Candidate candidate = {noise.noised(noise.scaled(score), id), id};
    if (is_better(candidate, best)) best = candidate;
  });
  return best;
}

// Makes the suppressed stop ids of the row -inf. The threads of all CTAs of the row call it.
template <typename T, int kBlocks>
__device__ void suppress_stops(const RowPlan<T>& plan) {
  const int part = part_of_row<kBlocks>();
  for (int64_t i = threadIdx.x; part == 0 && i < plan.num_suppressed; i += kSampleThreads) {
    const int32_t id = plan.stop_ids[i];
    if (id >= 0 && id < plan.vocab) plan.logits[id] = from_float<T>(-INFINITY);
  }
  sync_row<kBlocks>();
}

// The thread's best with noise. Not inlined, so that others have all registers.
template <typename AnyRow, int kBlocks, typename Shared>
__device__ __noinline__ Candidate noisy_best() {
  Shared& shared = shared_as<Shared>();
  const ThreadVectors share = own_vectors<kBlocks>(part_of_row<kBlocks>());
  const Noise noise = shared.plan.noise;
  return noisy_best(AnyRow::of(shared), share, noise);
}

// The thread's best of a row as planned.
template <typename AnyRow, int kBlocks, typename Shared>
__device__ Drawn best_of() {
  Shared& shared = shared_as<Shared>();
  const ThreadVectors share = own_vectors<kBlocks>(part_of_row<kBlocks>());
  if (shared.plan.noise.greedy()) return {greedy_best(AnyRow::of(shared), share), false};
  if (shared.plan.filter.on()) return filtered_best<AnyRow, kBlocks, Shared>();
  return {noisy_best<AnyRow, kBlocks, Shared>(), false};
}

// The thread's best of a row as planned. The threads of all CTAs of the row call it.
template <typename T, int kBlocks>
__device__ __noinline__ Drawn planned_best() {
  using Shared = SampleShared<T, kBlocks>;
  const RowPlan<T>& plan = shared_as<Shared>().plan;
  if (!plan.adjustment.on() && !plan.filter.on())
    return {noisy_best<Row<T>, kBlocks, Shared>(), false};
  if (plan.adjustment.on() && !hide_adjusted<T, kBlocks, Shared>())
    return best_of<AdjustedRow<T>, kBlocks, Shared>();
  return best_of<HidingRow<T, kBlocks>, kBlocks, Shared>();
}

// The same of a row that is not plain, has suppressed stop ids or asks for log-probabilities. Not
// inlined, so that others have all registers.
template <typename T, int kBlocks>
__device__ __noinline__ Drawn asked_best() {
  using Shared = SampleShared<T, kBlocks>;
  const RowPlan<T>& plan = shared_as<Shared>().plan;
  const bool has_logprobs = plan.logprobs.out != nullptr, suppresses = plan.num_suppressed > 0;
  Candidate best;
  if (has_logprobs && !plan.logprobs.processed) best = put_logprobs<T, kBlocks, Shared>();
  if (suppresses) suppress_stops<T, kBlocks>(plan);
  if (plan.logprobs.processed) put_processed_logprobs<T, kBlocks, Shared>();
  if (!plan.is_plain()) return planned_best<T, kBlocks>();
  if (!has_logprobs || plan.logprobs.processed || suppresses)
    best = greedy_best(plan.row(), own_vectors<kBlocks>(part_of_row<kBlocks>()));
  return {best, false};
}

// kBlocks CTAs per segment; more than one are a cluster.
template <typename T, int kBlocks>
__device__ __forceinline__ void sample_segment(const SampleParams& p) {
  using Shared = SampleShared<T, kBlocks>;
  const int64_t r = blockIdx.x / kBlocks;
  const int part = blockIdx.x % kBlocks;
  Shared& shared = shared_as<Shared>();
  if constexpr (kBlocks > 1) {
    let_next_start();
    sync_cluster();  // all CTAs are there, and may be written to
    wait_for_earlier();
  }
  const Segment s = load_segment(p.segments, r);
  const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
  if (errors != 0 || !is_sampled(s, p.row_state, p.rows) ||
      (has_automaton(p, s.row) && !apply_automaton<T, kBlocks>(p, r, part))) {
    if (threadIdx.x == 0 && part == 0) p.out[r] = -1;
    return;
  }
  const Row<T> row = row_of<T>(p, r);
  const Adjustment adjustment = load_adjustment(p, s.row);
  const bool is_plain = load_noise(s, p.row_state).greedy() && !adjustment.on();
  const bool asks = load_logprobs(p, r, s).out != nullptr;
  Drawn drawn{{}, false};
  if (is_plain && !asks && num_suppressed_stops(p, s) == 0) {
    drawn.best = greedy_best(row, own_vectors<kBlocks>(part));
  } else {
    // What the first look reads is on its way while the row is planned.
    if (adjustment.on()) prefetch_adjustment<T, kBlocks>(adjustment, part);
    prefetch_row(row, own_vectors<kBlocks>(part));
    if (threadIdx.x == 0) shared.hidden.listed = 0;
    plan_row(shared.plan, p, r, s);
    drawn = asked_best<T, kBlocks>();
  }
  Candidate best = block_best(drawn.best, shared.reduce);
  if constexpr (kBlocks > 1) {
    if (!drawn.by_first) best = cluster_best<T, kBlocks>(best, shared);
  }
  if (threadIdx.x >= kWarpSize || part != 0) return;
  if (best.id >= 0 && is_plain) best.id = first_equal(row, best);
  if (threadIdx.x != 0) return;
  p.out[r] = best.id;
  if (asks && best.id >= 0) {
    const Logprobs& logprobs = shared.plan.logprobs;
    float score = to_float(row.logits[best.id]);
    if (logprobs.processed) score = shared.plan.adjustment.adjusted(score, best.id);
    logprobs.put(kLogprobSampled, shared.logprobs.softmax.of(score));
  }
  if (best.id < 0 && p.row_errors != nullptr) p.row_errors[r] = kRecordNoCandidate;
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kSampleThreads, kSampleResident<T>)
    sample_kernel(const __grid_constant__ SampleParams p) {
  if constexpr (kBlocks == 1 || kHopperCode) sample_segment<T, kBlocks>(p);
}

template <typename T, int kBlocks>
int launch_sample(const SampleParams& p, void* stream) {
  LaunchShape shape{p.num_segments * kBlocks, kSampleThreads, sizeof(SampleShared<T, kBlocks>)};
  if (kBlocks > 1) shape.cluster = kBlocks;
  shape.pdl = kBlocks > 1;
  return launch(sample_kernel<T, kBlocks>, shape, stream, p);
}

template <typename T>
int sample_rows(const SampleParams& p, bool in_clusters, void* stream) {
  if (!in_clusters) return launch_sample<T, 1>(p, stream);
  return p.num_segments > kClusterRows ? launch_sample<T, kManyRowsCluster>(p, stream)
                                       : launch_sample<T, kSampleCluster>(p, stream);
}

}  // namespace photon::cuda
