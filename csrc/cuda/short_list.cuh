// The ids that a filter keeps, where they are few: those near enough are listed in the first CTA of
// the cluster, whose threads compare each with all others.
//
// How near is near enough follows from one look at the row: the threads are kGroups groups, each
// with a largest score, and the k-th largest of these has at least k ids at or above it, but rarely
// many more.
#pragma once
#include "common/filter.h"
#include "cuda/reduce.cuh"
#include "cuda/row_reduce.cuh"
#include "cuda/scaled_row.cuh"

namespace photon::cuda {

constexpr int kGroups = 128;
constexpr int kMostShortTopK = 100;  // groups beyond it have too small a largest score
constexpr int kGuessedTopK = 64;     // near enough for most, where top_k is off
constexpr int kListedByBlock = 256;
constexpr int kListed = kSampleThreads;  // of the cluster: one each thread

// What a CTA has found, as floats' bits.
struct BlockFound {
  float listed;  // ids that belong on the list, perhaps more than fit
  float all_low, all_high, listed_low, listed_high;  // masses: of all its ids, and of those
};

// In the shared memory of each CTA; the last four in the first one.
struct ShortList {
  float group_best[kGroups];
  float bound;
  uint32_t listed;  // by this CTA
  uint64_t mass_of_warp[2][kSampleWarps];
  BlockFound found[kMostBlocks];
  float ids[kMostBlocks][kListedByBlock];  // as the bits of floats
  float scaled[kMostBlocks][kListedByBlock];
  uint32_t distances[kListed];
  uint32_t weights[kListed];
};

__device__ inline uint64_t warp_total(uint64_t v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}

// The sum over the CTA; every thread gets it. `of_warp` is used by nothing else.
__device__ inline uint64_t block_total(uint64_t v, uint64_t* of_warp) {
  v = warp_total(v);
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  v = 0;
  for (int warp = 0; warp < kSampleWarps; ++warp) v += of_warp[warp];
  return v;
}

__device__ inline uint64_t joined(float low, float high) {
  return uint64_t{__float_as_uint(high)} << 32 | __float_as_uint(low);
}

// The largest of all threads' scores; every thread gets it. Afterwards the best of all groups are
// in every CTA.
template <int kBlocks>
__device__ float gather_groups(float score, ShortList& shared) {
  constexpr int kLanes = kBlocks * kSampleThreads / kGroups;
  const int lane = threadIdx.x % kLanes, rank = kBlocks > 1 ? cluster_rank() : 0;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    score = fmaxf(score, __shfl_xor_sync(kFullWarp, score, offset));
  const int group = rank * (kGroups / kBlocks) + threadIdx.x / kLanes;
  if (lane < kBlocks) put_in_block<kBlocks>(&shared.group_best[group], lane, score);
  if (threadIdx.x == 0) shared.listed = 0;
  sync_row<kBlocks>();
  score = -INFINITY;
  for (int i = threadIdx.x % kWarpSize; i < kGroups; i += kWarpSize)
    score = fmaxf(score, shared.group_best[i]);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    score = fmaxf(score, __shfl_xor_sync(kFullWarp, score, offset));
  return score;
}

// The k-th largest of the groups' best, k from 1 to kGroups: -inf if fewer have any.
__device__ inline float kth_group(int k, ShortList& shared) {
  constexpr int kParts = kSampleThreads / kGroups;  // threads that compare one with all others
  const int group = threadIdx.x / kParts;
  const float own = shared.group_best[group];
  int before = 0;
  for (int i = threadIdx.x % kParts; i < kGroups; i += kParts) {
    const float other = shared.group_best[i];
    before += other > own || (other == own && i < group) ? 1 : 0;
  }
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2)
    before += __shfl_xor_sync(kFullWarp, before, offset);
  if (threadIdx.x % kParts == 0 && before == k - 1) shared.bound = own;
  __syncthreads();
  return shared.bound;
}

// One row's list. All threads of the row's CTAs call fill(), which also says whether the list has
// all that the filter keeps; if so, draw().
template <typename AnyRow, int kBlocks>
struct RowList {
  const ScaledRow<AnyRow>& row;
  const Filter& filter;
  const int part;  // which CTA of the row's
  ShortList& shared;

  __device__ bool fill() const {
    const bool by_mass = filter.top_k <= 0;  // the mass of all ids is needed, too
    const float bound = kth_group(by_mass ? kGuessedTopK : filter.top_k, shared);
    const uint32_t limit = min(row.distance_of(bound), kFarthest);
    uint64_t all = 0, listed = 0;
    row.for_near(by_mass ? kFarthest : limit, [&](int32_t id, float scaled, uint32_t distance) {
      const uint32_t weight = by_mass ? weight_at(distance) : 0;
      all += weight;
      if (distance > limit) return;
      listed += weight;
      put(id, scaled);
    });
    if (by_mass) {
      all = block_total(all, shared.mass_of_warp[0]);
      listed = block_total(listed, shared.mass_of_warp[1]);
    }
    __syncthreads();
    if (threadIdx.x < kBlocks) tell(threadIdx.x, all, listed);
    sync_row<kBlocks>();
    return has_all();
  }

  __device__ void put(int32_t id, float scaled) const {
    const uint32_t at = atomicAdd(&shared.listed, 1u);
    if (at >= kListedByBlock) return;
    put_in_block<kBlocks>(&shared.ids[part][at], 0, __int_as_float(id));
    put_in_block<kBlocks>(&shared.scaled[part][at], 0, scaled);
  }

  __device__ void tell(uint32_t block, uint64_t all, uint64_t listed) const {
    BlockFound& found = shared.found[part];
    const auto put_word = [&](float& word, uint64_t value) {
      put_in_block<kBlocks>(&word, block, __uint_as_float(static_cast<uint32_t>(value)));
    };
    put_word(found.listed, shared.listed);
    put_word(found.all_low, all);
    put_word(found.all_high, all >> 32);
    put_word(found.listed_low, listed);
    put_word(found.listed_high, listed >> 32);
  }

  __device__ bool has_all() const {
    uint32_t count = 0, most = 0;
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t own = __float_as_uint(shared.found[block].listed);
      count += own;
      most = max(most, own);
    }
    if (count > kListed || most > kListedByBlock) return false;
    return filter.top_k > 0 || listed_mass() >= needed_mass(row_mass(), filter.top_p);
  }

  __device__ uint64_t row_mass() const {
    uint64_t mass = 0;
    for (int block = 0; block < kBlocks; ++block)
      mass += joined(shared.found[block].all_low, shared.found[block].all_high);
    return mass;
  }

  __device__ uint64_t listed_mass() const {
    uint64_t mass = 0;
    for (int block = 0; block < kBlocks; ++block)
      mass += joined(shared.found[block].listed_low, shared.found[block].listed_high);
    return mass;
  }

  // The thread's best of the ids that the filter keeps; the first CTA has them all.
  __device__ Candidate draw() const {
    if (part != 0) return {};
    uint32_t at = threadIdx.x, count = 0;
    int block = 0;
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t own = __float_as_uint(shared.found[i].listed);
      if (block == i && at >= own) at -= own, ++block;
      count += own;
    }
    const bool is_listed = threadIdx.x < count;
    const float scaled = is_listed ? shared.scaled[block][at] : 0.0f;
    const uint32_t distance = is_listed ? distance_below(row.top, scaled) : kTooFar;
    const uint32_t weight = is_listed ? weight_at(distance) : 0;
    shared.distances[threadIdx.x] = distance;
    shared.weights[threadIdx.x] = weight;
    __syncthreads();
    if (!is_kept(distance, weight, count) || !is_listed) return {};
    const int32_t id = __float_as_int(shared.ids[block][at]);
    return {row.noise.noised(scaled, id), id};
  }

  // Whether the filter keeps an id at this distance. All threads of the CTA call it.
  __device__ bool is_kept(uint32_t distance, uint32_t weight, uint32_t count) const {
    uint32_t nearer = 0;
    uint64_t nearer_mass = 0;
    if (distance != kTooFar) {
      for (uint32_t i = 0; i < count; ++i) {
        if (shared.distances[i] >= distance) continue;
        ++nearer;
        nearer_mass += shared.weights[i];
      }
    }
    const bool kept = filter.top_k <= 0 || nearer < static_cast<uint32_t>(filter.top_k);
    if (filter.top_p == 0) return kept && weight >= filter.least_weight;
    const uint64_t mass =
        filter.top_k <= 0 ? row_mass() : block_total(kept ? weight : 0, shared.mass_of_warp[0]);
    return kept && nearer_mass < needed_mass(mass, filter.top_p) && weight >= filter.least_weight;
  }
};

}  // namespace photon::cuda
