// Keys and values as kernels of attention write them and portable ones read them: of the op's
// dtype, or e4m3 bytes with a scale for each head of a token.
#pragma once
#include "common/e4m3.h"
#include "common/params.h"
#include "cuda/attention/rotate.cuh"
#include "cuda/stored_row.cuh"

namespace photon::cuda {

struct E4m3 {
  uint8_t bits;
};

struct E4m3Pack {
  uint64_t codes;  // kPack of them
};

// The scales of a tile's positions.
template <int kTokens>
struct TileScales {
  float keys[kTokens], values[kTokens];
};

// The first `count` elements at `p`, as load_pack() has them.
template <bool kVector, typename T>
__device__ inline Pack<T> load_kv(const T* p, int count) {
  return load_pack<kVector>(p, count);
}

template <bool kVector>
__device__ inline E4m3Pack load_kv(const E4m3* p, int count) {
  if constexpr (kVector) return {count > 0 ? *reinterpret_cast<const uint64_t*>(p) : 0};
  return {load_codes<false>(&p->bits, count)};
}

// Writes the first `count` codes; the same rule for kVector.
template <bool kVector>
__device__ inline void store_kv(E4m3* p, E4m3Pack pack, int count) {
  if constexpr (kVector) {
    if (count > 0) *reinterpret_cast<uint64_t*>(p) = pack.codes;
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) p[i] = {static_cast<uint8_t>(pack.codes >> (8 * i))};
    }
  }
}

// Element i, not scaled.
template <typename T>
__device__ inline float kv_number(const Pack<T>& pack, int i) {
  return to_float(pack.e[i]);
}

__device__ inline float kv_number(const E4m3Pack& pack, int i) {
  return e4m3_as_float(static_cast<uint32_t>(pack.codes >> (8 * i)) & 255);
}

// The largest of what `lanes` neighbours of `mask` have; all of them must call it.
__device__ inline uint32_t largest_of(uint32_t own, int lanes, unsigned mask) {
  for (int offset = 1; offset < lanes; offset *= 2) {
    const uint32_t other = __shfl_xor_sync(mask, own, offset);
    own = own > other ? own : other;
  }
  return own;
}

template <typename T>
__device__ inline uint32_t largest_magnitude(const Pack<T>& pack) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const uint32_t magnitude = magnitude_bits(to_float(pack.e[i]));
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest;
}

template <typename T>
__device__ inline E4m3Pack encoded(const Pack<T>& pack, float scale) {
  uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    codes |= static_cast<uint64_t>(e4m3_of(to_float(pack.e[i]), scale)) << (8 * i);
  return {codes};
}

// Of a head that a warp holds.
template <typename T>
__device__ inline uint32_t largest_magnitude(const LanePairs<T>& head, int head_dim) {
  uint32_t largest = 0;
  head.for_elements(head_dim, [&](int, T element) {
    const uint32_t magnitude = magnitude_bits(to_float(element));
    largest = largest > magnitude ? largest : magnitude;
  });
  return largest_of(largest, kWarpSize, kFullWarp);
}

// A new key or value by one warp: to shared memory, and into the cache where that is its own.
template <typename T>
__device__ inline void stage_new(const LanePairs<T>& head, int head_dim, T* shared, float*,
                                 T* cache, float*) {
  head.store(shared, head_dim);
  if (cache != nullptr) head.store(cache, head_dim);
}

template <typename T>
__device__ inline void stage_new(const LanePairs<T>& head, int head_dim, E4m3* shared,
                                 float* shared_scale, E4m3* cache, float* cache_scale) {
  const float scale = e4m3_scale(largest_magnitude(head, head_dim));
  head.for_elements(head_dim, [&](int d, T element) {
    const E4m3 code = {e4m3_of(to_float(element), scale)};
    shared[d] = code;
    if (cache != nullptr) cache[d] = code;
  });
  if (threadIdx.x % kWarpSize != 0) return;
  *shared_scale = scale;
  if (cache != nullptr) *cache_scale = scale;
}

}  // namespace photon::cuda
