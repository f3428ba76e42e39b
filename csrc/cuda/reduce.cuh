// Sums over a warp and a CTA by a fixed tree: the result depends on the values and on the number
// of threads, on nothing else.
#pragma once
#include "cuda/launch.cuh"

namespace photon::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Every lane gets the sum over its group of kLanes consecutive lanes. All lanes of the warp must
// call it.
template <int kLanes = kWarpSize>
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}

// Every lane gets the sum over the lanes up to itself. All lanes of the warp must call it.
template <typename Int>
__device__ inline Int warp_sum_upto(Int v) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Int before = __shfl_up_sync(kFullWarp, v, offset);
    if (lane >= offset) v += before;
  }
  return v;
}

// Every lane gets the sum of what `warps` warps, 32 at most, have each left in partial[warp]. All
// lanes of the warp must call it.
__device__ inline float sum_partials(const float* partial, int warps) {
  const int lane = threadIdx.x % kWarpSize;
  return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

// Every thread gets the sum over the CTA, whose size is a multiple of 32 and at most 1024.
// `partial` is shared memory of 32 floats that nothing else uses before the next barrier.
__device__ inline float block_sum(float v, float* partial) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  v = warp_sum(v);
  if (lane == 0) partial[warp] = v;
  __syncthreads();
  return sum_partials(partial, blockDim.x / kWarpSize);
}

}  // namespace photon::cuda
