// What a sampled segment draws its noise from.
#pragma once
#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "philox.h"
#include "segment.h"

namespace photon {

// What noise is added to; the temperature is above 0.
PHOTON_HOST_DEVICE inline float scaled_logit(float logit, float temperature) {
  return logit / temperature;
}

struct Noise {
  float temperature;  // not above 0: greedy, no noise
  uint32_t seed_low, seed_high, position;

  PHOTON_HOST_DEVICE bool greedy() const { return !(temperature > 0.0f); }
  PHOTON_HOST_DEVICE float divisor() const { return temperature; }  // of what noise is added to
  PHOTON_HOST_DEVICE float scaled(float logit) const { return scaled_logit(logit, temperature); }
  // By what logits are multiplied where they are scaled at all.
  PHOTON_HOST_DEVICE float scale() const { return greedy() ? 1.0f : 1.0f / temperature; }
  // Of a scaled logit; the id with the largest of these is drawn.
  PHOTON_HOST_DEVICE float noised(float scaled, int32_t id) const {
    const uint32_t bits = token_bits(seed_low, seed_high, position, static_cast<uint32_t>(id));
    return scaled - logf(-logf(open_uniform(bits)));
  }
};

// The row must be in the tables.
PHOTON_HOST_DEVICE inline Noise load_noise(const Segment& s, const int32_t* row_state) {
  const int32_t* row = row_words(row_state, s.row);
  return {float_word(row, kRowTemperature), static_cast<uint32_t>(row[kRowSeedLow]),
          static_cast<uint32_t>(row[kRowSeedHigh]),
          static_cast<uint32_t>(last_position(s, row_state))};
}

}  // namespace photon
