// What a sampled segment draws its noise from.
#pragma once
#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "segment.h"

namespace photon {

struct Noise {
  float temperature;  // not above 0: greedy, no noise
  uint32_t seed_low, seed_high, position;

  PHOTON_HOST_DEVICE bool greedy() const { return !(temperature > 0.0f); }
  // What noise is added to.
  PHOTON_HOST_DEVICE float scaled(float logit) const { return logit / temperature; }
};

// The row must be in the tables.
PHOTON_HOST_DEVICE inline Noise load_noise(const Segment& s, const int32_t* row_state) {
  const int32_t* row = row_words(row_state, s.row);
  Noise noise{0.0f, static_cast<uint32_t>(row[kRowSeedLow]),
              static_cast<uint32_t>(row[kRowSeedHigh]),
              static_cast<uint32_t>(last_position(s, row_state))};
  memcpy(&noise.temperature, row + kRowTemperature, sizeof(noise.temperature));
  return noise;
}

}  // namespace photon
