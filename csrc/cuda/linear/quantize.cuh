// A token as e4m3 bytes, by the threads of a CTA that have it in registers: see common/e4m3.h.
#pragma once
#include "common/e4m3.h"
#include "cuda/element.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// The largest of the CTA's. `warps`: shared memory of 32 words.
__device__ inline uint32_t block_largest(uint32_t own, uint32_t* warps) {
  own = __reduce_max_sync(kFullWarp, own);
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = own;
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t others = lane < static_cast<int>(blockDim.x) / kWarpSize ? warps[lane] : 0;
  return __reduce_max_sync(kFullWarp, others);
}

template <typename T>
__device__ inline uint32_t largest_of(const Pack<T>& pack) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) largest = max(largest, magnitude_bits(to_float(pack.e[i])));
  return largest;
}

// Two numbers; the first is the lower byte.
__device__ inline uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return e4m3_of(low) | static_cast<uint32_t>(e4m3_of(high)) << 8;
#endif
}

template <bool kVector, typename T>
__device__ inline void store_codes(uint8_t* to, const Pack<T>& pack, float scale, int64_t count) {
  const auto share = [&](int i) { return scale == 0.0f ? 0.0f : to_float(pack.e[i]) / scale; };
  uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kPack; i += 2)
    codes |= static_cast<uint64_t>(e4m3_pair(share(i), share(i + 1))) << (8 * i);
  if constexpr (kVector) {
    *reinterpret_cast<uint64_t*>(to) = codes;
  } else {
    for (int i = 0; i < kPack && i < count; ++i) to[i] = static_cast<uint8_t>(codes >> (8 * i));
  }
}

}  // namespace photon::cuda
