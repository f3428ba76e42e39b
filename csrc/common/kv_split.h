// How the Hopper kernel of decode attention cuts a token's context into splits, and the memory in
// which the results of a token's splits meet.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

constexpr int kMinSplits = 8, kMaxSplits = 64;

// A context of up to kFewTokens positions has kFewSplits splits at most, one for each CTA of a
// cluster.
constexpr int kFewSplits = 8;
constexpr int32_t kFewTokens = 2048;
static_assert(kFewSplits <=
              kMinSplits);  // where they meet in the workspace, it has room for most_splits()

// Splits of a long context, at most: with 2 to 16 KV heads one token has work for about 128 CTAs.
PHOTON_HOST_DEVICE constexpr int most_splits(int64_t kv_heads) {
  const int64_t even = 128 / kv_heads;
  return static_cast<int>(even < kMinSplits ? kMinSplits : even > kMaxSplits ? kMaxSplits : even);
}

// A workspace of W words begins with 4 * (W / 512) counters, one for the tokens' tiles of query
// heads each, zero whenever no call runs; the other words are partial results. Where the counters
// end depends on the workspace alone: calls of any size can share it.
constexpr int64_t kWorkspaceUnit = 512, kUnitCounters = 4;

PHOTON_HOST_DEVICE constexpr int64_t workspace_counters(int64_t words) {
  return words / kWorkspaceUnit * kUnitCounters;
}

// For each query head and split the sums of head_dim values, their highest score and their weight.
// With heads as wide as the kernel's there are more units than tokens * q_heads, and so counters
// enough.
constexpr int64_t attention_workspace_words(int64_t tokens, int64_t q_heads, int64_t kv_heads,
                                            int64_t head_dim) {
  const int64_t partials = tokens * q_heads * most_splits(kv_heads) * (head_dim + 2),
                room = kWorkspaceUnit - kUnitCounters;
  return (partials + room - 1) / room * kWorkspaceUnit;
}

}  // namespace photon
