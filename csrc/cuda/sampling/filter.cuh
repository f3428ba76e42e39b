// Sampling of a row that has a filter (common/filter.h): from a short list, or where that is too
// short, by a search.
#pragma once
#include "common/filter.h"
#include "common/noise.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sampling/filter_search.cuh"
#include "cuda/sampling/logits_row.cuh"
#include "cuda/sampling/row_reduce.cuh"
#include "cuda/sampling/scaled_row.cuh"
#include "cuda/sampling/short_list.cuh"

namespace photon::cuda {

constexpr int kGuessedTopK = 64;  // near enough for most, where top_k is off

// The sum over the CTA; every thread gets it. `of_warp` is used by nothing else.
__device__ inline uint64_t block_total(uint64_t v, uint64_t* of_warp) {
#pragma unroll 1
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v += __shfl_xor_sync(kFullWarp, v, offset);
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  v = 0;
#pragma unroll 4
  for (int warp = 0; warp < kSampleWarps; ++warp) v += of_warp[warp];
  return v;
}

// One row's list. All threads of the row's CTAs call fill(), which says whether the list has all
// that the filter keeps; if so, draw().
template <typename AnyRow, int kBlocks>
struct FilterList {
  const ScaledRow<AnyRow>& row;
  const Filter& filter;
  const Listing<kBlocks> listing;

  __device__ bool by_mass() const { return !filter.counts(); }  // of all ids, listed or not

  __device__ bool fill() const {
    ShortList& shared = listing.shared;
    const float bound = kth_group(by_mass() ? kGuessedTopK : filter.top_k, shared);
    const uint32_t limit = min(row.distance_of(bound), kFarthest);
    uint64_t all = 0, listed = 0;
    row.for_near(by_mass() ? kFarthest : limit, [&](int32_t id, float scaled, uint32_t distance) {
      const uint32_t weight = by_mass() ? weight_at(distance) : 0;
      all += weight;
      if (distance > limit) return;
      listed += weight;
      listing.put(id, scaled);
    });
    if (by_mass()) {
      all = block_total(all, shared.sum_of_warp[0]);
      listed = block_total(listed, shared.sum_of_warp[1]);
    }
    if (by_mass()) listing.put_sums(all, listed);
    if (!listing.close()) return false;
    return !by_mass() || listing.sum(1) >= filter.needed_mass(listing.sum(0));
  }

  // The thread's best of the ids that the filter keeps; the first CTA has them all.
  __device__ Candidate draw(const Noise& noise) const {
    if (listing.part != 0) return {};
    const Candidate own = listing.own();
    Standing standing{kTooFar, 0};
    if (own.id >= 0) {
      standing.distance = distance_below(row.top, own.score);
      standing.weight = weight_at(standing.distance);
    }
    listing.shared.standings[threadIdx.x] = standing;
    __syncthreads();
    const bool kept = is_kept(own, standing);
    return kept ? Candidate{noise.noised(own.score, own.id), own.id} : Candidate{};
  }

  // All threads of the CTA call it.
  __device__ bool is_kept(const Candidate& own, const Standing& standing) const {
    const ShortList& shared = listing.shared;
    const uint32_t listed = listing.count(), count = own.id < 0 ? 0 : listed;
    uint32_t nearer = 0;
    uint64_t nearer_mass = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < count; ++i) {
      const Standing other = shared.standings[i];
      const bool is_nearer = other.distance < standing.distance;
      nearer += is_nearer ? 1 : 0;
      nearer_mass += is_nearer ? other.weight : 0;
    }
    bool kept = own.id >= 0 && (by_mass() || nearer < static_cast<uint32_t>(filter.top_k));
    if (filter.sums()) {
      const uint64_t mass =
          by_mass() ? listing.sum(0)
                    : block_total(kept ? standing.weight : 0, listing.shared.sum_of_warp[0]);
      kept = kept && nearer_mass < filter.needed_mass(mass);
    }
    return kept && standing.weight >= filter.least_weight;
  }
};

// The thread's best of the ids that the filter keeps, by a search among all; `top`: the largest
// scaled logit.
template <typename AnyRow, int kBlocks, typename Shared>
__device__ __noinline__ Candidate searched_best(float top) {
  Shared& shared = shared_as<Shared>();
  const Noise& noise = shared.plan.noise;
  const AnyRow row = AnyRow::of(shared);
  const ThreadVectors share = own_vectors<kBlocks>(part_of_row<kBlocks>());
  const ScaledRow<AnyRow> scaled{row, share, noise.divisor(), top};
  return RowSearch<AnyRow, kBlocks>{scaled, shared.plan.filter, noise, shared.search}.best();
}

// A thread's best of what a row may draw.
struct Drawn {
  Candidate best;
  bool by_first;  // the row's first CTA has all there are
};

// The thread's best of the ids that the filter keeps. The threads of all CTAs of the row call it.
// Not inlined, so that rows without a filter have all registers.
template <typename AnyRow, int kBlocks, typename Shared>
__device__ __noinline__ Drawn filtered_best() {
  Shared& shared = shared_as<Shared>();
  const Filter& filter = shared.plan.filter;
  const float divisor = shared.plan.noise.divisor();
  const AnyRow row = AnyRow::of(shared);
  const int part = part_of_row<kBlocks>();
  const ThreadVectors share = own_vectors<kBlocks>(part);
  const float largest = gather_groups<kBlocks>(largest_score(row, share), shared.list);
  const float top = scaled_logit(largest, divisor);
  const ScaledRow<AnyRow> scaled{row, share, divisor, top};
  const FilterList<AnyRow, kBlocks> list{scaled, filter, {part, shared.list}};
  const bool may_be_few = filter.top_k > 0 ? filter.top_k <= kMostShort : filter.top_p != 0;
  if (may_be_few && list.fill()) return {list.draw(shared.plan.noise), true};
  return {searched_best<AnyRow, kBlocks, Shared>(top), false};
}

}  // namespace photon::cuda
