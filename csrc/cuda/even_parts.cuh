// How even_attention deals the work of a step to CTAs: which tokens go together, and how much of
// their context a CTA takes.
//
// An item is some consecutive tokens of one row, as many as a tile has rows for at most. Its work
// is as many units, tiles of kUnitKeys positions, as its longest context has, for each KV head; to
// begin with it and to end takes as long as kPartCost units, which stand before them. All units of
// a step stand in a line, item after item and head after head, and each CTA takes an equal share of
// them, one after the other. So a CTA has at most two parts of contexts that it shares with others:
// the first and the last.
#pragma once
#include <climits>
#include <cstdint>

#include "common/even_workspace.h"
#include "common/kv.h"
#include "common/params.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kUnitKeys = 128;
constexpr int kTileRows = kEvenRows;
constexpr int kMostItems = 4096;
constexpr int kPartCost = 2;
constexpr int kLeastShare = 1 + kPartCost;  // units: one part of one tile. To add up parts that are
                                            // any smaller takes longer
constexpr int32_t kNoRow = -1;

__device__ inline int32_t warp_least(int32_t v) { return __reduce_min_sync(kFullWarp, v); }
__device__ inline int32_t warp_most(int32_t v) { return __reduce_max_sync(kFullWarp, v); }

// A token's row, or kNoRow where it is dead, and the length of its context.
struct Context {
  int32_t row, length;
};

// The tokens of a step that are this op's: [first, end). A tile has `of_tile` of them at most.
struct StepTokens {
  const int32_t* meta;
  int32_t rows, capacity;  // of the tables, and of a row
  int first, end;
  int sharers, of_tile;  // query heads of a KV head; tokens

  __device__ explicit StepTokens(const PagedAttentionParams& p)
      : meta(p.decode_meta),
        rows(
            static_cast<int32_t>(p.cache.page_table != nullptr ? p.cache.rows : p.cache.num_pages)),
        capacity(static_cast<int32_t>(row_capacity(p.cache))),
        first(p.counts != nullptr
                  ? min(max(p.counts[kCountDecodeTokens], 0), static_cast<int>(p.tokens))
                  : 0),
        end(static_cast<int>(p.tokens)),
        sharers(static_cast<int>(p.q_heads / p.kv_heads)),
        of_tile(kTileRows / sharers) {}

  __device__ bool starts_tile(int token) const { return (token - first) % of_tile == 0; }

  // As kv_len() has it, without a branch, so that many loads follow each other closely.
  __device__ Context context(int token) const {
    const Token loaded = load_token(meta, token);
    const bool alive =
        loaded.length > 0 && static_cast<uint32_t>(loaded.row) < static_cast<uint32_t>(rows);
    return {alive ? loaded.row : kNoRow, alive ? min(loaded.length, capacity) : 0};
  }
};

struct Items {
  static constexpr int kOneToken = 1 << 16;

  int32_t tokens[kMostItems];      // the first, and how many: kOneToken for each
  int32_t before[kMostItems + 1];  // units of the items before, of one KV head
  int32_t count;
  int32_t warp_sums[kWarpSize];
};

// The sum of the values of the threads before this one, and of all. All threads of the CTA must
// call it.
struct Sums {
  int before, all;
};

template <int kThreads>
__device__ Sums sum_before(int value, int32_t* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int upto = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = upto;
  __syncthreads();
  Sums sums = {upto - value, 0};
#pragma unroll
  for (int i = 0; i < kThreads / kWarpSize; ++i) {
    if (i < warp) sums.before += warp_sums[i];
    sums.all += warp_sums[i];
  }
  __syncthreads();  // all have read the sums
  return sums;
}

// Finds the step's items. All threads of the CTA must call it.
template <int kThreads>
__device__ void list_items(const StepTokens& tokens, Items& items) {
  constexpr int kMostEach = (kMostItems + kThreads - 1) / kThreads, kBatch = 4;
  const int each = (tokens.end - tokens.first + kThreads - 1) / kThreads,
            begin = tokens.first + static_cast<int>(threadIdx.x) * each,
            count = max(min(each, tokens.end - begin), 0);
  Context own[kMostEach + 1];  // behind the token before
#pragma unroll
  for (int base = 0; base <= kMostEach; base += kBatch) {
    if (base > each) continue;
#pragma unroll
    for (int i = base; i < min(base + kBatch, kMostEach + 1); ++i) {
      const int token = begin + i - 1;
      own[i] = tokens.context(min(max(token, 0), tokens.end - 1));
      if (token < tokens.first) own[i].row = kNoRow;
    }
  }
  const auto starts = [&](int i) {
    return own[i].row != kNoRow &&
           (own[i].row != own[i - 1].row || tokens.starts_tile(begin + i - 1));
  };
  int started = 0;
#pragma unroll
  for (int i = 1; i <= kMostEach; ++i) {
    if (i <= each) started += i <= count && starts(i);
  }
  const Sums found = sum_before<kThreads>(started, items.warp_sums);
  for (int i = threadIdx.x; i < found.all; i += kThreads) items.tokens[i] = items.before[i] = 0;
  __syncthreads();
  int item = found.before - 1;
#pragma unroll
  for (int i = 1; i <= kMostEach; ++i) {
    if (i > each || i > count || own[i].row == kNoRow) continue;
    const bool is_first = starts(i);
    item += is_first;
    atomicAdd(&items.tokens[item], Items::kOneToken + (is_first ? begin + i - 1 : 0));
    atomicMax(&items.before[item], (own[i].length + kUnitKeys - 1) / kUnitKeys + kPartCost);
  }
  __syncthreads();
  const int items_each = (found.all + kThreads - 1) / kThreads,
            first_item = min(static_cast<int>(threadIdx.x) * items_each, found.all),
            end_item = min(first_item + items_each, found.all);
  int units = 0;
  for (int i = first_item; i < end_item; ++i) units += items.before[i];
  const Sums counted = sum_before<kThreads>(units, items.warp_sums);
  int before = counted.before;
  for (int i = first_item; i < end_item; ++i) {
    const int own = items.before[i];
    items.before[i] = before;
    before += own;
  }
  if (threadIdx.x == 0) {
    items.count = found.all;
    items.before[found.all] = counted.all;
  }
  __syncthreads();
}

// A CTA's part of an item, for one KV head: units [begin, end) of `units`, of which CTAs
// `first_cta` and those that follow have one of `count` parts each.
struct Part {
  int first_token, tokens, kv_head, units, begin, end, first_cta, count;

  __device__ bool is_whole() const { return begin == 0 && end == units; }
};

// Goes through a CTA's share, part by part.
class Share {
 public:
  __device__ Share(const Items& items, int kv_heads, int cta, int ctas)
      : items_(items), kv_heads_(kv_heads) {
    const int all = items.before[items.count] * kv_heads;
    size_ = max((all + ctas - 1) / ctas, kLeastShare);
    at_ = min(cta * size_, all);
    end_ = min(at_ + size_, all);
    int low = 0, high = max(items.count, 1);  // the item is one of [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (items.before[middle] * kv_heads <= at_ ? low : high) = middle;
    }
    item_ = low;
  }

  // Moves to the next part; false: there is none.
  __device__ bool next(Part& part) {
    while (at_ < end_) {
      while (items_.before[item_ + 1] * kv_heads_ <= at_) ++item_;
      const int before = items_.before[item_], all = items_.before[item_ + 1] - before,
                from = at_ - before * kv_heads_, head = from / all, own = from - head * all,
                end = min(all, own + end_ - at_), first = at_ - own,
                first_cta = (first + kPartCost) / size_;
      at_ += end - own;
      if (end <= kPartCost) continue;
      part = {items_.tokens[item_] % Items::kOneToken,
              items_.tokens[item_] / Items::kOneToken,
              head,
              all - kPartCost,
              max(own - kPartCost, 0),
              end - kPartCost,
              first_cta,
              (first + all - 1) / size_ - first_cta + 1};
      return true;
    }
    return false;
  }

 private:
  const Items& items_;
  int kv_heads_, size_, at_, end_, item_;
};

// The row of a part's tokens, and the smallest and the largest of their lengths.
struct Lengths {
  int32_t row, least, most;
};

// All lanes of a warp must call it, and all get the same.
__device__ inline Lengths load_lengths(const StepTokens& tokens, const Part& part) {
  Lengths lengths = {tokens.context(part.first_token).row, INT_MAX, 0};
#pragma unroll
  for (int i = 0; i < kTileRows; i += kWarpSize) {
    const int own = i + static_cast<int>(threadIdx.x) % kWarpSize,
              token = part.first_token + min(own, part.tokens - 1);  // or the last one once more
    const int32_t length = tokens.context(token).length;
    lengths.least = min(lengths.least, length);
    lengths.most = max(lengths.most, length);
  }
  lengths.least = warp_least(lengths.least);
  lengths.most = warp_most(lengths.most);
  return lengths;
}

}  // namespace photon::cuda
