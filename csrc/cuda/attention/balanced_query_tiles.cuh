// The query tiles of a step of balanced_attention: which of its tokens go together, and how much
// work each is.
//
// An query tile is some consecutive tokens of one row, as many as a tile has rows for at most. Its
// work is as many KV tiles, tiles of kTileKeys positions, as its longest context has, for each KV
// head; to begin with it and to end takes as long as kPartialCost KV tiles, which stand before
// them.
#pragma once
#include <cstdint>

#include "common/balanced_workspace.h"
#include "common/kv.h"
#include "common/params.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kTileKeys = 128;
constexpr int kTileRows = kBalancedRows;
constexpr int kMaxQueryTiles = 4096;
constexpr int kPartialCost = 2;
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

struct QueryTiles {
  static constexpr int kOneToken = 1 << 16;

  int32_t tokens[kMaxQueryTiles];      // the first, and how many: kOneToken for each
  int32_t before[kMaxQueryTiles + 1];  // KV tiles of the query tiles before, of one KV head
  int32_t count;
  int32_t starts[kMaxQueryTiles /
                 kWarpSize];  // query tiles that begin in each 32 tokens; then before them
  int32_t warp_sums[kWarpSize];
};

// 32 tokens of a step, one of each lane of a warp, and the query tiles that they belong to.
struct TokenGroup {
  Context own;      // of a dead token, or one that is not this op's: kNoRow
  unsigned starts;  // a bit for each token that a query tile begins with
  unsigned alive;
  int32_t row_before;  // lane 0: of the token in front of all

  // Asks for the tokens of group `number`. All of a warp's groups are asked for at once.
  __device__ void load(const StepTokens& tokens, int number) {
    const int token = token_of(number);
    own = tokens.context(min(token, tokens.end - 1));
    row_before = kNoRow;
    if (threadIdx.x % kWarpSize == 0 && token > tokens.first)
      row_before = tokens.context(token - 1).row;
  }

  __device__ void find_starts(const StepTokens& tokens, int number) {
    const int token = token_of(number);
    if (token < tokens.first || token >= tokens.end) own.row = kNoRow;
    int32_t before = __shfl_up_sync(kFullWarp, own.row, 1);
    if (threadIdx.x % kWarpSize == 0) before = row_before;
    const bool is_alive = own.row != kNoRow;
    starts = __ballot_sync(kFullWarp, is_alive && (own.row != before || tokens.starts_tile(token)));
    alive = __ballot_sync(kFullWarp, is_alive);
  }

  // What the group has of a query tile, in the lane of its last token there; else no tokens.
  struct Piece {
    int query_tile;  // of those that begin in the group; -1: the one that goes on from the group
                     // before
    int first_token, tokens;
    int32_t length;  // the longest context
  };

  __device__ Piece piece(int number) const {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned upto = 0xffffffffu >> (kWarpSize - 1 - lane), begun = starts & upto;
    const int first = begun != 0 ? kWarpSize - 1 - __clz(begun) : 0;
    int32_t length = own.length;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, length, offset);
      if (lane - offset >= first) length = max(length, other);
    }
    const bool is_last = lane == kWarpSize - 1 || ((starts | ~alive) >> (lane + 1) & 1) != 0;
    const bool is_piece = is_last && (alive >> lane & 1) != 0;
    return {__popc(begun) - 1, token_of(number) - lane + first, is_piece ? lane - first + 1 : 0,
            length};
  }

 private:
  __device__ static int token_of(int number) {
    return number * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
  }
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

// Notes the step's query tiles, with the KV tiles of each in `before`, and returns how many there
// are. A warp has kMostEach groups of tokens at most; code for groups that are not there is jumped
// over at once, because it would come from L2. All threads of the CTA must call it.
template <int kThreads, int kMostEach>
__device__ int note_query_tiles(const StepTokens& tokens, QueryTiles& query_tiles) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int thread = threadIdx.x, warp = thread / kWarpSize,
            groups = (tokens.end + kWarpSize - 1) / kWarpSize;
  TokenGroup own[kMostEach];
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    if (i * kWarps + warp >= groups) break;
    own[i].load(tokens, i * kWarps + warp);
  }
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    const int number = i * kWarps + warp;
    if (number >= groups) break;
    own[i].find_starts(tokens, number);
    if (thread % kWarpSize == 0) query_tiles.starts[number] = __popc(own[i].starts);
  }
  __syncthreads();
  const int begun = thread < groups ? query_tiles.starts[thread] : 0;
  const SumsBefore found = sum_before<kThreads>(begun, query_tiles.warp_sums);
  if (thread < groups) query_tiles.starts[thread] = found.before;
  __syncthreads();
  // An query tile that began in an earlier group is added to once that has noted it.
  for (const bool goes_on : {false, true}) {
#pragma unroll
    for (int i = 0; i < kMostEach; ++i) {
      const int number = i * kWarps + warp;
      if (number >= groups) break;
      const TokenGroup::Piece piece = own[i].piece(number);
      if (piece.tokens == 0 || goes_on != (piece.query_tile < 0)) continue;
      const int query_tile = query_tiles.starts[number] + piece.query_tile,
                kv_tiles = (piece.length + kTileKeys - 1) / kTileKeys + kPartialCost;
      if (goes_on) {
        atomicAdd(&query_tiles.tokens[query_tile], QueryTiles::kOneToken * piece.tokens);
        atomicMax(&query_tiles.before[query_tile], kv_tiles);
      } else {
        query_tiles.tokens[query_tile] = QueryTiles::kOneToken * piece.tokens + piece.first_token;
        query_tiles.before[query_tile] = kv_tiles;
      }
    }
    __syncthreads();
  }
  return found.all;
}

// Finds the step's query tiles. All threads of the CTA must call it.
template <int kThreads>
__device__ void list_query_tiles(const StepTokens& tokens, QueryTiles& query_tiles) {
  constexpr int kMostEach = (kMaxQueryTiles + kThreads - 1) / kThreads;  // small steps: 1
  const int count = tokens.end <= kThreads
                        ? note_query_tiles<kThreads, 1>(tokens, query_tiles)
                        : note_query_tiles<kThreads, kMostEach>(tokens, query_tiles),
            each = (count + kThreads - 1) / kThreads,
            begin = min(static_cast<int>(threadIdx.x) * each, count),
            end = min(begin + each, count);
  int kv_tiles = 0;
  for (int i = begin; i < end; ++i) kv_tiles += query_tiles.before[i];
  const SumsBefore counted = sum_before<kThreads>(kv_tiles, query_tiles.warp_sums);
  int before = counted.before;
  for (int i = begin; i < end; ++i) {
    const int own = query_tiles.before[i];
    query_tiles.before[i] = before;
    before += own;
  }
  if (threadIdx.x == 0) {
    query_tiles.count = count;
    query_tiles.before[count] = counted.all;
  }
  __syncthreads();
}

}  // namespace photon::cuda
