// Elements in registers: conversion to and from float32, and packs of eight that move with 16-byte
// accesses where alignment allows. A pack holds the same elements whichever way it was loaded, so
// the order of a sum never depends on alignment.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace photon::cuda {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// The value that a tensor of T would hold.
template <typename T>
__device__ inline float rounded(float v) {
  return to_float(from_float<T>(v));
}

// The same of two values, which where T is bfloat16 is one instruction of less delay than two.
template <typename T>
__device__ inline void round_both(float& a, float& b) {
  a = rounded<T>(a);
  b = rounded<T>(b);
}
template <>
__device__ inline void round_both<__nv_bfloat16>(float& a, float& b) {
  const float2 pair = __bfloat1622float2(__floats2bfloat162_rn(a, b));
  a = pair.x;
  b = pair.y;
}

constexpr int kPack = 8;

template <typename T>
struct alignas(16) Pack {
  T e[kPack];
};

template <typename T>
__device__ inline Pack<T> zero_pack() {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kPack; ++i) pack.e[i] = from_float<T>(0.0f);
  return pack;
}

// The first `count` elements at `p`, zeros after them. kVector: p is 16-byte aligned and count is
// either >= kPack or <= 0.
template <bool kVector, typename T>
__device__ inline Pack<T> load_pack(const T* p, int64_t count) {
  Pack<T> pack = zero_pack<T>();
  if constexpr (kVector) {
    if (count > 0) {
#pragma unroll
      for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i)
        reinterpret_cast<uint4*>(&pack)[i] = reinterpret_cast<const uint4*>(p)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) pack.e[i] = p[i];
    }
  }
  return pack;
}

// Writes the first `count` elements; the same rule for kVector.
template <bool kVector, typename T>
__device__ inline void store_pack(T* p, const Pack<T>& pack, int64_t count) {
  if constexpr (kVector) {
    if (count > 0) {
#pragma unroll
      for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i)
        reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(&pack)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) p[i] = pack.e[i];
    }
  }
}

__device__ inline float silu(float v) { return v / (1.0f + expf(-v)); }

// silu(gate) * up with the roundings of two separate tensor operations, as transformers does it.
template <typename T>
__device__ inline T silu_times(float gate, float up) {
  return from_float<T>(rounded<T>(silu(gate)) * up);
}

}  // namespace photon::cuda
