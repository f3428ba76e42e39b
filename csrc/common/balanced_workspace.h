// The memory in which balanced_attention leaves the sums of contexts that several CTAs share.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

constexpr int kBalancedRows = 128;  // of a tile: query heads of tokens

// A CTA has a counter for each of its warpgroups, zero whenever no call runs, and two partial
// tiles: of each row the sums of head_dim values, their highest score and their weight.
constexpr int kBalancedCounters = 32;  // words

PHOTON_HOST_DEVICE constexpr int64_t balanced_partial_words(int64_t head_dim) {
  return kBalancedRows * (head_dim + 2);
}

PHOTON_HOST_DEVICE constexpr int64_t chunk_workspace_words(int64_t head_dim, int64_t ctas) {
  return ctas * (kBalancedCounters + 2 * balanced_partial_words(head_dim));
}

}  // namespace photon
