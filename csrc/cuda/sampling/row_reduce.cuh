// What the threads of a row's CTAs find together: one CTA, or a cluster.
#pragma once
#include <cmath>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
constexpr int kMostBlocks = 8;  // CTAs of a cluster

struct Candidate {
  float score = -INFINITY;
  int32_t id = -1;  // -1: none
};

// A total order on candidates, so that the winner does not depend on the order of comparison:
// higher score, then lower id.
__device__ inline bool is_better(const Candidate& a, const Candidate& b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0 && b.id < 0;
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// A CTA's shared memory.
struct RowShared {
  Candidate of_warp[kSampleWarps];
  float value_of_warp[2][kWarpSize];  // used by turns
  Candidate best;
};

// The CTA's dynamic shared memory as what its kernel keeps there. A function that is not inlined
// asks for it: of a reference that it is given nobody would know that it is to shared memory.
template <typename Shared>
__device__ Shared& shared_as() {
  return *reinterpret_cast<Shared*>(dynamic_shared());
}

// Which of its row's CTAs this one is.
template <int kBlocks>
__device__ int part_of_row() {
  return kBlocks > 1 ? cluster_rank() : 0;
}

template <int kBlocks>
__device__ void sync_row() {
  if constexpr (kBlocks > 1)
    sync_cluster();
  else
    __syncthreads();
}

// Writes to the place that `pointer` names in the shared memory of one of the row's CTAs.
template <int kBlocks>
__device__ void put_in_block(float* pointer, uint32_t block, float value) {
  if constexpr (kBlocks > 1)
    store_in_block(pointer, block, value);
  else
    *pointer = value;
}

// A score, which is not NaN, as an integer of the same order: -0 and 0 are one.
__device__ inline uint32_t ordered(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 1u << 31;
}

__device__ inline float of_ordered(uint32_t order) {
  return __uint_as_float((order >> 31) != 0 ? order & ~(1u << 31) : ~order);
}

// Every lane gets the warp's. An id of -1 is the largest as an unsigned number.
__device__ inline Candidate warp_best(const Candidate& own) {
  const uint32_t order = ordered(own.score), best = __reduce_max_sync(kFullWarp, order);
  const uint32_t id =
      __reduce_min_sync(kFullWarp, order == best ? static_cast<uint32_t>(own.id) : UINT32_MAX);
  return {of_ordered(best), static_cast<int32_t>(id)};
}

// The first warp's result is the CTA's.
__device__ inline Candidate block_best(Candidate best, RowShared& shared) {
  best = warp_best(best);
  if (threadIdx.x % kWarpSize == 0) shared.of_warp[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return best;
  return warp_best(threadIdx.x < kSampleWarps ? shared.of_warp[threadIdx.x] : Candidate{});
}

}  // namespace photon::cuda
