// The tokens of a step as balanced_attention sees them, and the sizes of its tiles.
#pragma once
#include <cstdint>

#include "common/balanced_plan.h"
#include "common/kv.h"
#include "common/params.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kTileKeys = 128;
constexpr int kTileRows = kBalancedRows;
constexpr int kPartialCost = 2;  // KV tiles that a query tile's begin and end take as long as
constexpr int32_t kNoRow = -1;

__device__ inline int count_kv_tiles(const Lengths& lengths) {
  return (lengths.most + kTileKeys - 1) / kTileKeys;
}

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
        sharers(static_cast<int>(p.q_heads) / static_cast<int>(p.kv_heads)),
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

__device__ inline PlanSizes plan_sizes(const PagedAttentionParams& p, int ctas) {
  return {static_cast<int32_t>(p.tokens), ctas, static_cast<int32_t>(p.kv_heads),
          static_cast<int16_t>(static_cast<int32_t>(p.q_heads) / static_cast<int32_t>(p.kv_heads)),
          static_cast<int16_t>(p.exact)};
}

}  // namespace photon::cuda
