// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
// counter-based generator, so that a row's noise depends on its seed, its position and the token id
// alone, never on the batch it rides in.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

struct Philox4 {
  uint32_t v[4];
};

constexpr int kPhiloxRounds = 10;

// One round; the keys become those of the next.
PHOTON_HOST_DEVICE inline Philox4 philox_round(const Philox4& counter, uint32_t& key0,
                                               uint32_t& key1) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * counter.v[0];
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter.v[2];
  const Philox4 next = {
      {static_cast<uint32_t>(p1 >> 32) ^ counter.v[1] ^ key0, static_cast<uint32_t>(p1),
       static_cast<uint32_t>(p0 >> 32) ^ counter.v[3] ^ key1, static_cast<uint32_t>(p0)}};
  key0 += 0x9E3779B9u;
  key1 += 0xBB67AE85u;
  return next;
}

PHOTON_HOST_DEVICE inline Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) counter = philox_round(counter, key0, key1);
  return counter;
}

// The 32 random bits of one token id at one position: lane (id & 3) of block (id >> 2). On a GPU
// few ids are asked for alone: to fetch unrolled code would take longer than to run it.
PHOTON_HOST_DEVICE inline uint32_t token_bits(uint32_t seed_low, uint32_t seed_high,
                                              uint32_t position, uint32_t id) {
  Philox4 block = {{id >> 2, position, 0u, 0u}};
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
  for (int round = 0; round < kPhiloxRounds; ++round)
    block = philox_round(block, seed_low, seed_high);
  const uint32_t low = (id & 1u) != 0 ? block.v[1] : block.v[0];
  const uint32_t high = (id & 1u) != 0 ? block.v[3] : block.v[2];
  return (id & 2u) != 0 ? high : low;
}

// A uniform number in (0, 1), never 0 and never 1 in float32: 23 random bits, centred.
PHOTON_HOST_DEVICE inline float open_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

}  // namespace photon
