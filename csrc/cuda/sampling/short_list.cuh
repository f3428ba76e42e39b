// The likeliest ids of a row, where few are asked for: listed in the first CTA of the cluster,
// whose threads compare each with all others.
//
// Which to list follows from one look at the row: the threads are kGroups groups, each with a
// largest score, and the k-th largest of these has at least k ids at or above it, but rarely many
// more.
#pragma once
#include "cuda/reduce.cuh"
#include "cuda/sampling/row_reduce.cuh"

namespace photon::cuda {

constexpr int kGroups = 128;
constexpr int kMostShort = 100;  // for k beyond it the k-th group has too small a largest score
constexpr int kListedByBlock = 256;
constexpr int kListed = kSampleThreads;  // of the cluster: one each thread

// Two sums of a CTA's, as the bits of floats.
struct BlockSums {
  float low[2], high[2];
};

// Where an id of the list stands in a filter (common/filter.h).
struct alignas(8) Standing {
  uint32_t distance, weight;
};

// In the shared memory of each CTA; the list itself in the first one.
struct ShortList {
  alignas(16) float group_best[kGroups];
  float bound;
  uint32_t listed;  // by this CTA
  uint64_t sum_of_warp[2][kSampleWarps];
  BlockSums sums[kMostBlocks];
  float listed_by[kMostBlocks];  // ids that belong on the list, perhaps more than fit: as the bits
  float ids[kMostBlocks][kListedByBlock];  // as the bits of floats
  float values[kMostBlocks][kListedByBlock];
  Candidate candidates[kListed];
  Standing standings[kListed];
};

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
  const auto compare = [&](float other, int i) {
    before += other > own || (other == own && i < group) ? 1 : 0;
  };
#pragma unroll 2
  for (int turn = 0; turn < kGroups / kParts / 4; ++turn) {
    const int i = (turn * kParts + threadIdx.x % kParts) * 4;
    const float4 four = *reinterpret_cast<const float4*>(&shared.group_best[i]);
    compare(four.x, i);
    compare(four.y, i + 1);
    compare(four.z, i + 2);
    compare(four.w, i + 3);
  }
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2)
    before += __shfl_xor_sync(kFullWarp, before, offset);
  if (threadIdx.x % kParts == 0 && before == k - 1) shared.bound = own;
  __syncthreads();
  return shared.bound;
}

// A list under way. All threads of the row's CTAs call close(); before it, put().
template <int kBlocks>
struct Listing {
  const int part;  // which CTA of the row's
  ShortList& shared;

  __device__ void put(int32_t id, float value) const {
    const uint32_t at = atomicAdd(&shared.listed, 1u);
    if (at >= kListedByBlock) return;
    put_in_block<kBlocks>(&shared.ids[part][at], 0, __int_as_float(id));
    put_in_block<kBlocks>(&shared.values[part][at], 0, value);
  }

  // Two sums of this CTA's, before close().
  __device__ void put_sums(uint64_t first, uint64_t second) const {
    if (threadIdx.x >= kBlocks) return;
    BlockSums& sums = shared.sums[part];
    const auto put_word = [&](float& word, uint64_t value) {
      put_in_block<kBlocks>(&word, threadIdx.x, __uint_as_float(static_cast<uint32_t>(value)));
    };
    put_word(sums.low[0], first);
    put_word(sums.high[0], first >> 32);
    put_word(sums.low[1], second);
    put_word(sums.high[1], second >> 32);
  }

  // False: there are more than the list holds.
  __device__ bool close() const {
    __syncthreads();
    if (threadIdx.x < kBlocks)
      put_in_block<kBlocks>(&shared.listed_by[part], threadIdx.x, __uint_as_float(shared.listed));
    sync_row<kBlocks>();
    return __reduce_max_sync(kFullWarp, listed_by_lane()) <= kListedByBlock && count() <= kListed;
  }

  __device__ uint32_t listed(int block) const { return __float_as_uint(shared.listed_by[block]); }

  // Of the CTA whose rank is the lane's.
  __device__ uint32_t listed_by_lane() const {
    const uint32_t lane = threadIdx.x % kWarpSize;
    return lane < kBlocks ? listed(lane) : 0;
  }

  // By all CTAs. All lanes of a warp call it.
  __device__ uint32_t count() const { return __reduce_add_sync(kFullWarp, listed_by_lane()); }

  // The sum over all CTAs.
  __device__ uint64_t sum(int which) const {
    uint64_t sum = 0;
    for (int block = 0; block < kBlocks; ++block) {
      const BlockSums& sums = shared.sums[block];
      sum += uint64_t{__float_as_uint(sums.high[which])} << 32 | __float_as_uint(sums.low[which]);
    }
    return sum;
  }

  // In the first CTA: what the thread has of a list that holds all, also in shared.candidates
  // after the next barrier; no candidate beyond its end.
  __device__ Candidate own() const {
    const uint32_t thread = threadIdx.x;
    int block = kBlocks;
    uint32_t at = 0, end = 0;
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t begin = end;
      end += listed(i);
      if (begin <= thread && thread < end) {
        block = i;
        at = thread - begin;
      }
    }
    Candidate own;
    if (block < kBlocks) own = {shared.values[block][at], __float_as_int(shared.ids[block][at])};
    shared.candidates[threadIdx.x] = own;
    return own;
  }
};

}  // namespace photon::cuda
