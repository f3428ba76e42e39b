// Two elements side by side, as instructions on pairs take them: less of these than of
// instructions on one element, for the same values.
#pragma once
#include <cstring>

#include "cuda/element.cuh"

namespace photon::cuda {

template <typename T>
struct PairOf;
template <>
struct PairOf<float> {
  using type = float2;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <typename T>
using Pair = typename PairOf<T>::type;

__device__ inline float2 to_floats(float2 v) { return v; }
__device__ inline float2 to_floats(__half2 v) { return __half22float2(v); }
// A shift and a mask; __bfloat1622float2 takes one instruction more.
__device__ inline float2 to_floats(__nv_bfloat162 v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

template <typename T>
__device__ inline Pair<T> from_floats(float low, float high);
template <>
__device__ inline float2 from_floats<float>(float low, float high) {
  return {low, high};
}
template <>
__device__ inline __half2 from_floats<__half>(float low, float high) {
  return __floats2half2_rn(low, high);
}
template <>
__device__ inline __nv_bfloat162 from_floats<__nv_bfloat16>(float low, float high) {
  return __floats2bfloat162_rn(low, high);
}

// Products, each rounded once.
__device__ inline float2 times(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
__device__ inline __half2 times(__half2 a, __half2 b) { return __hmul2(a, b); }
__device__ inline __nv_bfloat162 times(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmul2(a, b); }

// Elements 2 i and 2 i + 1.
template <typename T>
__device__ inline Pair<T> get_pair(const Pack<T>& pack, int i) {
  Pair<T> pair;
  memcpy(&pair, pack.e + 2 * i, sizeof(pair));
  return pair;
}

template <typename T>
__device__ inline void set_pair(Pack<T>& pack, int i, Pair<T> pair) {
  memcpy(pack.e + 2 * i, &pair, sizeof(pair));
}

}  // namespace photon::cuda
