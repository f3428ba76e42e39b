// Sampling of a row that has a filter (common/filter.h).
#pragma once
#include "common/filter.h"
#include "common/noise.h"
#include "cuda/filter_list.cuh"
#include "cuda/filter_search.cuh"
#include "cuda/logits_row.cuh"
#include "cuda/row_reduce.cuh"
#include "cuda/scaled_row.cuh"
#include "cuda/short_list.cuh"

namespace photon::cuda {

// The thread's best of the ids that the filter keeps, by a search among all.
template <int kBlocks, typename AnyRow>
__device__ __noinline__ Candidate searched_best(const ScaledRow<AnyRow>& row, const Filter& filter,
                                                FilterSearch& shared) {
  RowFilter<AnyRow, kBlocks> at_work{row, shared};
  __syncthreads();  // what shares its memory is read no more
  if (threadIdx.x == 0) shared.listed = 0;
  at_work.clear(0);
  __syncthreads();
  if (filter.top_k > 0)
    at_work.lower_limit([](uint32_t) { return 1u; },
                        [&](uint64_t) { return static_cast<uint64_t>(filter.top_k); });
  if (filter.top_p != 0)
    at_work.lower_limit([](uint32_t distance) { return weight_at(distance); },
                        [&](uint64_t total) { return needed_mass(total, filter.top_p); });
  Candidate best;
  at_work.for_near([&](int32_t id, uint32_t distance) {
    if (weight_at(distance) < filter.least_weight) return;
    const float scaled = row.noise.scaled(row.row.score(to_float(row.row.logits[id]), id));
    const Candidate candidate = {row.noise.noised(scaled, id), id};
    if (is_better(candidate, best)) best = candidate;
  });
  return best;
}

// The thread's best of the ids that the filter keeps. The threads of all CTAs of the row call it.
// Not inlined, so that rows without a filter have all registers.
template <int kBlocks, typename T, template <typename> typename AnyRow>
__device__ __noinline__ Candidate filtered_best(const AnyRow<T>& row, ThreadVectors share,
                                                const Noise& noise, const Filter& filter,
                                                ShortList& list_shared, FilterSearch& shared) {
  const float top = gather_groups<kBlocks>(greedy_best(row, share).score, list_shared);
  const ScaledRow<AnyRow<T>> scaled{row, share, noise, noise.scaled(top)};
  const int part = kBlocks > 1 ? cluster_rank() : 0;
  const FilterList<AnyRow<T>, kBlocks> list{scaled, filter, {part, list_shared}};
  const bool may_be_few = filter.top_k > 0 ? filter.top_k <= kMostShort : filter.top_p != 0;
  if (may_be_few && list.fill()) return list.draw();
  return searched_best<kBlocks>(scaled, filter, shared);
}

}  // namespace photon::cuda
