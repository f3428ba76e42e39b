// The memory in which balanced_attention leaves the sums of contexts that several CTAs share.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

constexpr int kBalancedRows = 128;  // of a tile: query heads of tokens

// A slot has room for a partial tile: of each row the sums of head_dim values, their highest score
// and their weight. In front of it are counters, one for each of a CTA's warpgroups, zero whenever
// no call runs; in that of the first slot, one for the work of an exact step, too.
constexpr int kBalancedCounters = 32;  // words
constexpr int64_t kBalancedSlots = 2;  // of a CTA
// Of an exact step: for partial tiles that are spread, and one of the CTA's own.
constexpr int64_t kSpreadSlots = 8, kExactSlots = kSpreadSlots + 1;

PHOTON_HOST_DEVICE constexpr int64_t balanced_slot_words(int64_t head_dim) {
  return kBalancedCounters + kBalancedRows * (head_dim + 2);
}

PHOTON_HOST_DEVICE constexpr int64_t chunk_workspace_words(int64_t head_dim, int64_t ctas,
                                                           bool exact) {
  return ctas * (exact ? kExactSlots : kBalancedSlots) * balanced_slot_words(head_dim);
}

}  // namespace photon
