// Where exact steps of balanced_attention cut contexts: at positions that follow from nothing else,
// so that a token's bits do not depend on the step. All numbers are KV tiles.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

// Each 8 tiles up to 64, and from there on four parts for each doubling: no part is longer than a
// quarter of what is in front of it, or 8.
constexpr int32_t kFirstParts = 4, kFirstPartShift = 3;

PHOTON_HOST_DEVICE constexpr int32_t part_begin(int32_t part) {
  const int32_t doublings = part < 2 * kFirstParts ? 0 : part / kFirstParts - 1;
  return (part - kFirstParts * doublings) << (kFirstPartShift + doublings);
}

// The part that a KV tile is in.
PHOTON_HOST_DEVICE constexpr int32_t part_of(int32_t kv_tile) {
  int32_t doublings = 0;
  while (kv_tile >> (kFirstPartShift + doublings) >= 2 * kFirstParts) ++doublings;
  return kFirstParts * doublings + (kv_tile >> (kFirstPartShift + doublings));
}

// Of a context that is not empty.
PHOTON_HOST_DEVICE constexpr int32_t count_parts(int32_t kv_tiles) {
  return part_of(kv_tiles - 1) + 1;
}

static_assert(part_begin(8) == 64 && part_begin(9) == 80 && part_begin(12) == 128);
static_assert(part_of(63) == 7 && part_of(64) == 8 && part_of(127) == 11 && part_of(128) == 12);

}  // namespace photon
