// The tokens of a launch of split attention by the length of their contexts, longest first.
#pragma once
#include "cuda/attention/split_grid.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// In shared memory. Tokens with as many work items are of one class, those with kClasses or more,
// too, and stand in the order of their indices, so that all CTAs have the same order. Dead tokens
// have no place.
struct TokenOrder {
  // As many tokens as 1 KiB holds (ReductionMemory). The last class has one work item.
  static constexpr int kTokens = 448, kClasses = kWarpSize;

  unsigned places[kClasses];  // while sorting: tokens of a class, then where the next one goes
  uint16_t tokens[kTokens];

  // One warp calls it, and a barrier of the CTA follows. Of grid.tokens up to kTokens.
  __device__ void sort(const SplitGrid& grid) {
    const int lane = threadIdx.x % kWarpSize;
    places[lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < grid.tokens; i += kWarpSize) {
      const int32_t length = grid.kv_len(i);
      if (length > 0) atomicAdd(&places[class_of(grid, length)], 1u);
    }
    __syncwarp();
    const unsigned count = places[lane];
    places[lane] = warp_sum_upto(count) - count;
    __syncwarp();
#pragma unroll 1
    for (int from = 0; from < grid.tokens; from += kWarpSize)
      place(grid, from + lane, from + lane < grid.tokens ? grid.kv_len(from + lane) : 0);
  }

 private:
  __device__ static int class_of(const SplitGrid& grid, int32_t length) {
    return kClasses - min(static_cast<int>(grid.items_of(length)), kClasses);
  }

  // Each lane has a token; length 0: none.
  __device__ void place(const SplitGrid& grid, int token, int32_t length) {
    const int lane = threadIdx.x % kWarpSize, own = class_of(grid, max(length, 1));
    unsigned peers = __ballot_sync(kFullWarp, length > 0);  // of the lane's class
#pragma unroll
    for (int bit = 1; bit < kClasses; bit *= 2) {
      const unsigned set = __ballot_sync(kFullWarp, (own & bit) != 0);
      peers &= (own & bit) != 0 ? set : ~set;
    }
    const unsigned first = places[own], before = __popc(peers & ((1u << lane) - 1));
    if (length > 0) tokens[first + before] = static_cast<uint16_t>(token);
    __syncwarp();
    if (peers >> lane == 1) places[own] = first + before + 1;
    __syncwarp();
  }
};

}  // namespace photon::cuda
