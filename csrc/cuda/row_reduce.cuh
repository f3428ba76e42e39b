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

__device__ inline Candidate warp_best(Candidate best) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const Candidate other = {__shfl_xor_sync(kFullWarp, best.score, offset),
                             __shfl_xor_sync(kFullWarp, best.id, offset)};
    if (is_better(other, best)) best = other;
  }
  return best;
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
