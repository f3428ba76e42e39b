// The plan of a step of balanced_attention, in device memory: how the step's work is dealt out to
// CTAs. balanced_plan_kernel writes it once a step, and the attention of every layer reads it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "balanced_workspace.h"
#include "host_device.h"

namespace photon {

constexpr int64_t kBalancedTokens = 4096;  // of a step, at most

// What a plan was made for. Attention of other sizes has no use of it, and does nothing.
struct alignas(16) PlanSizes {
  int32_t tokens, ctas, kv_heads;
  int16_t sharers;  // query heads of a KV head
  int16_t exact;    // 1: contexts are cut at fixed positions

  // Without a branch, so that one load brings all of them.
  PHOTON_HOST_DEVICE bool are(const PlanSizes& other) const {
    return ((tokens ^ other.tokens) | (ctas ^ other.ctas) | (kv_heads ^ other.kv_heads) |
            (sharers ^ other.sharers) | (exact ^ other.exact)) == 0;
  }
};

// The row of a query tile's tokens, and the smallest and the largest of their lengths.
struct Lengths {
  int32_t row, least, most;
};

// Some consecutive tokens of one row, as many as a tile has rows for at most. Of an exact step: all
// of their context, or a part of it.
struct alignas(16) QueryTile {
  static constexpr int32_t kOneToken = 1 << 16;

  int32_t tokens;  // the first, and how many: kOneToken for each
  Lengths lengths;
  int32_t before, upto;  // KV tiles of one KV head, its own not counted, and counted. Of an exact
                         // step: its own are [before, upto) of the context's
  int32_t place;         // of an exact step's contexts that are spread: of the first part

  PHOTON_HOST_DEVICE int32_t first_token() const { return tokens % kOneToken; }
  PHOTON_HOST_DEVICE int32_t count() const { return tokens / kOneToken; }
};

// The part of a query tile, for one KV head, that one CTA computes: KV tiles [begin, end) of its
// context. CTA `first` and those that follow have one of the query tile's `count` partial tiles
// each; of an exact step, slot `first` and each kv_heads-th behind it are these tiles'. Without
// tokens: there is none.
struct PartialTile {
  int32_t first_token, tokens, kv_head, begin, end, first, count;
  Lengths lengths;

  PHOTON_HOST_DEVICE bool is_there() const { return tokens > 0; }
  PHOTON_HOST_DEVICE bool is_whole() const { return count == 1; }
};

// Where a CTA is in the line of all KV tiles of a step: from `at`, within query tile `query_tile`,
// to `end`. Each CTA has `size` of them. Of an exact step: `end` items, and nothing else.
struct alignas(16) LineRange {
  int32_t size, at, end, query_tile;
};

// What a CTA does: a partial tile, and then what is left of its range.
struct alignas(16) CtaPlan {
  PartialTile first;
  LineRange rest;
};

// The words of a plan.
struct StepPlan {
  static constexpr int64_t kSizesWords = 16;  // so that a CTA's part lies in two sectors

  PlanSizes* sizes;
  CtaPlan* ctas;
  QueryTile* tiles;

  PHOTON_HOST_DEVICE StepPlan(int32_t* words, const PlanSizes& own)
      : sizes(reinterpret_cast<PlanSizes*>(words)),
        ctas(reinterpret_cast<CtaPlan*>(words + kSizesWords)),
        tiles(reinterpret_cast<QueryTile*>(ctas + own.ctas)) {}
};

// Of a plan of steps of up to so many tokens, and attention by up to so many CTAs; steps of more
// tokens than balanced attention takes have none.
PHOTON_HOST_DEVICE constexpr int64_t chunk_plan_words(int64_t tokens, int64_t ctas, bool exact) {
  constexpr int64_t kOfCta = sizeof(CtaPlan) / sizeof(int32_t),
                    kOfToken = sizeof(QueryTile) / sizeof(int32_t);
  const int64_t query_tiles = tokens < kBalancedTokens ? tokens : kBalancedTokens,
                spread = exact ? ctas * kSpreadSlots : 0;
  return StepPlan::kSizesWords + ctas * kOfCta +
         (query_tiles > spread ? query_tiles : spread) * kOfToken;
}

// CTAs that a workspace has room for.
constexpr int64_t workspace_ctas(int64_t workspace_words, int64_t head_dim, bool exact) {
  return workspace_words / chunk_workspace_words(head_dim, 1, exact);
}

// CTAs of balanced attention, which the plan and every layer deal the work out to: one for each SM,
// where the workspace has room.
inline int64_t balanced_ctas(int64_t sms, int64_t workspace_words, int64_t head_dim, bool exact) {
  return std::min(sms, workspace_ctas(workspace_words, head_dim, exact));
}

}  // namespace photon
