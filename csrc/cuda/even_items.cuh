// The items of a step of even_attention: which of its tokens go together, and how much work each
// is.
//
// An item is some consecutive tokens of one row, as many as a tile has rows for at most. Its work
// is as many units, tiles of kUnitKeys positions, as its longest context has, for each KV head; to
// begin with it and to end takes as long as kPartCost units, which stand before them.
#pragma once
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
struct SumsBefore {
  int before, all;
};

template <int kThreads>
__device__ SumsBefore sum_before(int value, int32_t* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int upto = warp_sum_upto(value);
  if (lane == kWarpSize - 1) warp_sums[warp] = upto;
  __syncthreads();
  SumsBefore sums = {upto - value, 0};
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
  const SumsBefore found = sum_before<kThreads>(started, items.warp_sums);
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
  const SumsBefore counted = sum_before<kThreads>(units, items.warp_sums);
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

}  // namespace photon::cuda
