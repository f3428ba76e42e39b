// What a launch of split attention has worked out for its CTAs.
#pragma once
#include "cuda/attention/split_cache.cuh"
#include "cuda/divisor.cuh"

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

}  // namespace photon::cuda
