// The 16-bit floating types of cuda_bf16.h and cuda_fp16.h: bits, converted to and from float32
// with rounding to nearest, ties to even.
#pragma once
#include <cstdint>

#include "emulator/keywords.h"
#include "emulator/math.h"

namespace emulator {

inline float bf16_to_float(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the NaN that CUDA gives
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = bits >> 10 & 0x1fu,
                 fraction = bits & 0x3ffu;
  if (exponent == 0)
    return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu,
                 sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u)
    return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on it rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in
                                  // the lowest bits
    return static_cast<uint16_t>(
        sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign |
                               ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

}  // namespace emulator

#define PHOTON_HALF_TYPE(Type, Type2, to_float, from_float)                \
  struct Type {                                                            \
    uint16_t bits;                                                         \
    Type() = default;                                                      \
    Type(float value) : bits(emulator::from_float(value)) {}               \
    operator float() const { return emulator::to_float(bits); }            \
  };                                                                       \
  struct alignas(4) Type2 {                                                \
    Type x, y;                                                             \
    Type2() = default;                                                     \
    Type2(Type x, Type y) : x(x), y(y) {}                                  \
  };                                                                       \
  inline float __low2float(Type2 pair) { return pair.x; }                  \
  inline float __high2float(Type2 pair) { return pair.y; }                 \
  inline Type2 __hadd2(Type2 a, Type2 b) {                                 \
    return {Type(float(a.x) + float(b.x)), Type(float(a.y) + float(b.y))}; \
  }                                                                        \
  inline Type2 __hsub2(Type2 a, Type2 b) {                                 \
    return {Type(float(a.x) - float(b.x)), Type(float(a.y) - float(b.y))}; \
  }                                                                        \
  inline Type2 __hmul2(Type2 a, Type2 b) {                                 \
    return {Type(float(a.x) * float(b.x)), Type(float(a.y) * float(b.y))}; \
  }                                                                        \
  inline Type2 __habs2(Type2 pair) {                                       \
    pair.x.bits &= 0x7fff, pair.y.bits &= 0x7fff;                          \
    return pair;                                                           \
  }                                                                        \
  inline Type2 __hmax2(Type2 a, Type2 b) {                                 \
    return {Type(fmaxf(a.x, b.x)), Type(fmaxf(a.y, b.y))};                 \
  }                                                                        \
  inline Type __hadd(Type a, Type b) { return Type(float(a) + float(b)); } \
  inline Type __hmul(Type a, Type b) { return Type(float(a) * float(b)); }
