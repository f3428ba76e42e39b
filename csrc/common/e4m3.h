// How numbers become e4m3 bytes (1 sign, 4 exponent and 3 mantissa bits, bias 7; no infinity): a
// token's head of keys or values, or all that a linear reads of a token, is divided by its own
// scale, its largest magnitude by kMostE4m3.
#pragma once
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace photon {

constexpr float kMostE4m3 = 448.0f;
constexpr uint32_t kMagnitudeBits = 0x7fffffff;

PHOTON_HOST_DEVICE inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PHOTON_HOST_DEVICE inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// What is compared for the largest magnitude: as an integer, among which NaN is above all numbers.
PHOTON_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  return bits_of_float(value) & kMagnitudeBits;
}

PHOTON_HOST_DEVICE inline float e4m3_scale(uint32_t largest) {
  return float_of_bits(largest) / kMostE4m3;
}

// The nearest one, ties to even; of what is beyond kMostE4m3, and of NaN, that. (A GPU's
// instruction gives NaN for NaN.)
PHOTON_HOST_DEVICE inline uint8_t e4m3_of(float value) {
  constexpr uint32_t kMost = 0x43e00000;  // kMostE4m3
  const uint32_t bits = bits_of_float(value), own = bits & kMagnitudeBits,
                 magnitude = own < kMost ? own : kMost;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // Below 2^-6 the unit is 2^-9, the last bit of a float from 2^14 on.
  const uint32_t subnormal =
      bits_of_float(float_of_bits(magnitude) + 16384.0f) - bits_of_float(16384.0f);
  const uint32_t rounded = magnitude < (121u << 23) ? subnormal : normal;
  return static_cast<uint8_t>(((bits >> 24) & 0x80u) | rounded);
}

// One of the numbers with this scale; 0 where all are.
PHOTON_HOST_DEVICE inline uint8_t e4m3_of(float value, float scale) {
  return e4m3_of(scale == 0.0f ? 0.0f : value / scale);
}

// All of them; returns their scale.
inline float quantize_e4m3(uint8_t* out, const float* numbers, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t own = magnitude_bits(numbers[i]);
    largest = largest > own ? largest : own;
  }
  const float scale = e4m3_scale(largest);
  for (int64_t i = 0; i < count; ++i) out[i] = e4m3_of(numbers[i], scale);
  return scale;
}

}  // namespace photon
