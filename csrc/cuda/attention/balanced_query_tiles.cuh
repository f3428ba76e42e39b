// The query tiles of a step of balanced_attention: which of its tokens go together, and how much
// work each is. balanced_plan_kernel finds them, by one CTA.
//
// A query tile is some consecutive tokens of one row, as many as a tile has rows for at most. Its
// work is as many KV tiles, tiles of kTileKeys positions, as its longest context has, for each KV
// head; to begin with it and to end takes as long as kPartialCost KV tiles, which stand before
// them. Of an exact step it has as many places as its context has parts.
#pragma once
#include "common/balanced_parts.h"
#include "cuda/attention/balanced_tokens.cuh"

namespace photon::cuda {

constexpr int kMaxQueryTiles = static_cast<int>(kBalancedTokens);

struct QueryTiles {
  QueryTile tiles[kMaxQueryTiles];
  int32_t count, places;  // on the line of one KV head
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
    if (threadIdx.x % kWarpSize == 0 && token > tokens.first && token < tokens.end)
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
    Lengths lengths;
  };

  __device__ Piece piece(int number) const {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned upto = 0xffffffffu >> (kWarpSize - 1 - lane), begun = starts & upto;
    const int first = begun != 0 ? kWarpSize - 1 - __clz(begun) : 0;
    Lengths lengths = {own.row, own.length, own.length};
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t least = __shfl_up_sync(kFullWarp, lengths.least, offset),
                    most = __shfl_up_sync(kFullWarp, lengths.most, offset);
      if (lane - offset < first) continue;
      lengths.least = min(lengths.least, least);
      lengths.most = max(lengths.most, most);
    }
    const bool is_last = lane == kWarpSize - 1 || ((starts | ~alive) >> (lane + 1) & 1) != 0;
    const bool is_piece = is_last && (alive >> lane & 1) != 0;
    return {__popc(begun) - 1, token_of(number) - lane + first, is_piece ? lane - first + 1 : 0,
            lengths};
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

// Notes the step's query tiles, and returns how many there are. A warp has kMostEach groups of
// tokens at most, and asks for all of them in one go, without a branch. All threads of the CTA must
// call it.
template <int kThreads, int kMostEach>
__device__ int note_query_tiles(const StepTokens& tokens, QueryTiles& query_tiles) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int thread = threadIdx.x, warp = thread / kWarpSize,
            groups = (tokens.end + kWarpSize - 1) / kWarpSize;
  TokenGroup own[kMostEach];
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) own[i].load(tokens, i * kWarps + warp);
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
  // A query tile that began in an earlier group is added to once that has noted it.
  for (const bool goes_on : {false, true}) {
#pragma unroll
    for (int i = 0; i < kMostEach; ++i) {
      const int number = i * kWarps + warp;
      if (number >= groups) break;
      const TokenGroup::Piece piece = own[i].piece(number);
      if (piece.tokens == 0 || goes_on != (piece.query_tile < 0)) continue;
      QueryTile& tile = query_tiles.tiles[query_tiles.starts[number] + piece.query_tile];
      if (goes_on) {
        atomicAdd(&tile.tokens, QueryTile::kOneToken * piece.tokens);
        atomicMin(&tile.lengths.least, piece.lengths.least);
        atomicMax(&tile.lengths.most, piece.lengths.most);
      } else {
        tile = {QueryTile::kOneToken * piece.tokens + piece.first_token, piece.lengths, 0, 0, 0};
      }
    }
    __syncthreads();
  }
  return found.all;
}

// Of a query tile and a KV head: KV tiles and what their begin and end cost, or parts.
__device__ inline int count_places(const Lengths& lengths, bool exact) {
  const int kv_tiles = count_kv_tiles(lengths);
  return exact ? count_parts(kv_tiles) : kv_tiles + kPartialCost;
}

// Finds the step's query tiles. All threads of the CTA must call it.
template <int kThreads>
__device__ void list_query_tiles(const StepTokens& tokens, bool exact, QueryTiles& query_tiles) {
  constexpr int kMostEach = (kMaxQueryTiles + kThreads - 1) / kThreads;  // small steps: 1
  const int count = tokens.end <= kThreads
                        ? note_query_tiles<kThreads, 1>(tokens, query_tiles)
                        : note_query_tiles<kThreads, kMostEach>(tokens, query_tiles),
            each = (count + kThreads - 1) / kThreads,
            begin = min(static_cast<int>(threadIdx.x) * each, count),
            end = min(begin + each, count);
  int places = 0;
  for (int i = begin; i < end; ++i) places += count_places(query_tiles.tiles[i].lengths, exact);
  const SumsBefore counted = sum_before<kThreads>(places, query_tiles.warp_sums);
  int before = counted.before;
  for (int i = begin; i < end; ++i) {
    QueryTile& tile = query_tiles.tiles[i];
    tile.before = before;
    tile.upto = before += count_places(tile.lengths, exact);
  }
  if (threadIdx.x == 0) {
    query_tiles.count = count;
    query_tiles.places = counted.all;
  }
  __syncthreads();
}

}  // namespace photon::cuda
