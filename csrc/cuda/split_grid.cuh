// What a launch of split attention has worked out for its CTAs, and the lengths of its tokens.
#pragma once
#include "cuda/divisor.cuh"
#include "cuda/split_cache.cuh"

namespace photon::cuda {

constexpr int kWarpGroupTokens = 64;  // positions that a warp group takes in a step

// Vectors of tokens and heads, in the strides of a tensor.
template <typename T>
struct TokenHeads {
  T* base;
  int token_stride, head_stride;

  TokenHeads(T* base, int64_t token_stride, int64_t head_stride)
      : base(base),
        token_stride(static_cast<int>(token_stride)),
        head_stride(static_cast<int>(head_stride)) {}

  __device__ T* at(int token, int head) const {
    return base + static_cast<int64_t>(token) * token_stride +
           static_cast<int64_t>(head) * head_stride;
  }
};

// What the host has worked out, in 32 bits. A split-KV group: the tile ranges of a tile of query
// heads of a token.
struct SplitGrid {
  const int32_t* decode_meta;
  int tokens, q_heads, group;  // group: query heads of a KV head
  Divisor token_split_groups;  // split-KV groups of a token
  Divisor tiles;               // split-KV groups of a KV head
  Divisor splits;              // of a long context
  Divisor blocks;              // of the launch
  Divisor rank_pieces;  // of a query's sums, that a rank merges at most (split_reduction.cuh)
  int rank_bits;        // log2 of a cluster's CTAs
  int item_bits;        // log2 of a work item's positions
  unsigned slack;       // work items more than in an even division that a CTA may take with whole
                        // split-KV groups, which saves a reduction
  SplitCache cache;
  TokenHeads<const Bf16> q, k, v;
  TokenHeads<Bf16> out;

  __device__ int ranks() const { return 1 << rank_bits; }
  // What falls to a rank, of so many things, at most.
  __device__ int each_rank(int things) const { return (things + ranks() - 1) >> rank_bits; }

  __device__ unsigned items_of(int32_t length) const {
    return (static_cast<unsigned>(length) + (1u << item_bits) - 1) >> item_bits;
  }

  // Positions that a token attends to, if it is live.
  __device__ int32_t kv_len(int token) const {
    return cache.kv_len(load_token(decode_meta, token));
  }
};

// The lengths of many tokens, a lane's 32 tokens apart, all requested before one is looked at; 0
// where there is no token.
struct LaneLengths {
  static constexpr int kOfLane = 2, kTokens = kOfLane * kWarpSize;

  int32_t of[kOfLane];

  __device__ LaneLengths(const SplitGrid& grid, int from) {
    Token tokens[kOfLane];
#pragma unroll
    for (int j = 0; j < kOfLane; ++j)
      tokens[j] = load_token(grid.decode_meta, min(index(from, j), grid.tokens - 1));
#pragma unroll
    for (int j = 0; j < kOfLane; ++j)
      of[j] = index(from, j) < grid.tokens ? grid.cache.kv_len(tokens[j]) : 0;
  }

 private:
  __device__ static int index(int from, int j) {
    return from + j * kWarpSize + static_cast<int>(threadIdx.x % kWarpSize);
  }
};

}  // namespace photon::cuda
