// Pairs of bfloat16, and of float16, in a register, as matrix instructions take them: the first
// element in the low half.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/ptx.cuh"

namespace photon::cuda {

using Bf16 = __nv_bfloat16;

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// One of the two types, by its bits.
__device__ inline float wide(uint32_t bits, bool is_half) {
  return is_half ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
                 : __uint_as_float(bits << 16);
}

// Two products, rounded once.
__device__ inline uint32_t times_bf16(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, sizeof(a));
  memcpy(&y, &b, sizeof(b));
  const __nv_bfloat162 product = __hmul2(x, y);
  uint32_t bits;
  memcpy(&bits, &product, sizeof(bits));
  return bits;
}

// Four e4m3 numbers, exactly: the lower two, the upper two. With sign, exponent and mantissa where
// a bfloat16 has them, each is 2^-120 times itself, subnormal ones included. NaN is read as 480.
__device__ inline void bf16_of_e4m3(uint32_t (&pairs)[2], uint32_t codes) {
  constexpr uint32_t kPlaces = 0x87f087f0, kPower = 0x7b807b80;  // 2^120, twice
  extend_bytes(pairs, codes);
  for (uint32_t& pair : pairs) pair = times_bf16(pair << 4 & kPlaces, kPower);
}

// The larger of each two magnitudes; NaN is passed over.
__device__ inline uint32_t larger_bf16(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, sizeof(a));
  memcpy(&y, &b, sizeof(b));
  const __nv_bfloat162 larger = __hmax2(__habs2(x), __habs2(y));
  uint32_t bits;
  memcpy(&bits, &larger, sizeof(bits));
  return bits;
}

__device__ inline float2 floats_of_halves(uint32_t pair) {
  __half2 halves;
  memcpy(&halves, &pair, sizeof(pair));
  return __half22float2(halves);
}

// Two differences of float16, rounded once.
__device__ inline uint32_t minus_f16(uint32_t a, uint32_t b) {
  __half2 x, y;
  memcpy(&x, &a, sizeof(a));
  memcpy(&y, &b, sizeof(b));
  const __half2 difference = __hsub2(x, y);
  uint32_t bits;
  memcpy(&bits, &difference, sizeof(bits));
  return bits;
}

// Four bytes less 128 as float16: the lower two, the upper two. 0x6400 | b is 1024 + b.
__device__ inline void halves_of_int8(uint32_t (&pairs)[2], uint32_t codes) {
  constexpr uint32_t kOnes = 0x64646464, kMiddle = 0x64806480;  // 1024 + 128, twice
  pairs[0] = minus_f16(__byte_perm(codes, kOnes, 0x4140), kMiddle);
  pairs[1] = minus_f16(__byte_perm(codes, kOnes, 0x4342), kMiddle);
}

// Of float16.
__device__ inline uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ inline uint32_t bf16_as_f16(uint32_t pair) {
  return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

}  // namespace photon::cuda
