// Stands in for the CUDA toolkit's header.
#pragma once
#include "emulator/half_types.h"

PHOTON_HALF_TYPE(__half, __half2, f16_to_float, float_to_f16)
using half = __half;
using half2 = __half2;

inline float __half2float(__half value) { return value; }
inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half2 __float22half2_rn(float2 pair) { return {pair.x, pair.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float2half2_rn(float value) { return {value, value}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }

inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  value.bits = bits;
  return value;
}
