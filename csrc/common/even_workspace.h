// The memory in which even_attention leaves the sums of contexts that several CTAs share.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

constexpr int kEvenRows = 128;  // of a tile: query heads of tokens

// A CTA has a counter for each of its warpgroups, zero whenever no call runs, and two parts of a
// context: of each row the sums of head_dim values, their highest score and their weight.
constexpr int kEvenCounters = 32;  // words

PHOTON_HOST_DEVICE constexpr int64_t even_part_words(int64_t head_dim) {
  return kEvenRows * (head_dim + 2);
}

PHOTON_HOST_DEVICE constexpr int64_t chunk_workspace_words(int64_t head_dim, int64_t ctas) {
  return ctas * (kEvenCounters + 2 * even_part_words(head_dim));
}

}  // namespace photon
