// Which ids of a row may be drawn: the k likeliest, the likeliest that have a share of the mass,
// those near the likeliest; in this order, ties included. All in integers: sums depend on no order,
// and CPU, GPU and reference.py agree on every id.
//
// Where an id stands is its distance below the row's largest scaled logit (Noise::scaled), in units
// of 2^-27 of a halving of the probability. Distances reach 22.18, and the noise of two ids differs
// by 19.5 at most (open_uniform), so that what is farther is never drawn.
#pragma once
#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "segment.h"

namespace photon {

struct Filter {
  int32_t top_k;          // not above 0: off
  uint32_t top_p;         // in units of 2^-32; 0: off
  uint32_t least_weight;  // of an id; 0: off

  PHOTON_HOST_DEVICE bool counts() const { return top_k > 0; }
  PHOTON_HOST_DEVICE bool sums() const { return top_p != 0; }
  PHOTON_HOST_DEVICE bool on() const { return counts() || sums() || least_weight != 0; }
  PHOTON_HOST_DEVICE uint64_t needed_count() const { return static_cast<uint64_t>(top_k); }
  PHOTON_HOST_DEVICE uint64_t needed_mass(uint64_t total) const;
};

constexpr float kDistanceUnits = 0x1.715476p+27f;  // log2(e) * 2^27
constexpr uint32_t kTooFar = 0xffffffffu;          // no candidate
constexpr uint32_t kFarthest = kTooFar - 1;
constexpr int kHalvingBits = 27;
constexpr uint32_t kOneHalving = 1u << kHalvingBits;
constexpr int kWeightBits = 31;  // the likeliest id weighs 2^31

// The row must be in the tables. A share or a bound that is none counts as off.
PHOTON_HOST_DEVICE inline Filter load_filter(const Segment& s, const int32_t* row_state) {
  const int32_t* row = row_words(row_state, s.row);
  const float top_p = float_word(row, kRowTopP), min_p = float_word(row, kRowMinP);
  Filter filter{row[kRowTopK], 0, 0};
  if (top_p > 0.0f && top_p < 1.0f)
    filter.top_p = static_cast<uint32_t>(fmaxf(top_p * 4294967296.0f, 1.0f));
  if (min_p > 0.0f && min_p <= 1.0f)
    filter.least_weight = static_cast<uint32_t>(min_p * 2147483648.0f);
  return filter;
}

// Of an id whose logit is above -inf and not NaN, from scaled logits.
PHOTON_HOST_DEVICE inline uint32_t distance_below(float top, float scaled) {
  const float units = scaled == top ? 0.0f : (top - scaled) * kDistanceUnits;
  return units < 4294967296.0f ? static_cast<uint32_t>(units) : kTooFar;
}

// The upper half of a product.
PHOTON_HOST_DEVICE inline uint32_t mul_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}

// How likely an id at this distance is: 2^31 at 0, and half of it at each halving; right to 7e-8 of
// it and to one unit. (2^-f by a polynomial of degree 5 that is exact at 0.)
PHOTON_HOST_DEVICE inline uint32_t weight_at(uint32_t distance) {
  const uint32_t f = (distance & (kOneHalving - 1)) << (32 - kHalvingBits);
  uint32_t power = 19791209u - mul_high(f, 2036727u);
  power = 118771734u - mul_high(f, power);
  power = 515791228u - mul_high(f, power);
  power = 1488515800u - mul_high(f, power);
  power = (1u << kWeightBits) - mul_high(f, power);
  return power >> (distance >> kHalvingBits);
}

// The mass that the likeliest ids must reach, of a total that is not 0.
PHOTON_HOST_DEVICE inline uint64_t Filter::needed_mass(uint64_t total) const {
  const uint64_t mass = (total >> 32) * top_p + (((total & 0xffffffffu) * top_p) >> 32);
  return mass > 0 ? mass : 1;
}

}  // namespace photon
