// What both launchers of split attention work out on the host: split_attention.cu,
// warp_attention.cu.
#pragma once
#include "cuda/attention/split_attention.cuh"
#include "cuda/launch.cuh"

namespace photon::cuda {

inline Partials partials_in(const FusedAttentionDecodeParams& p) {
  float* sums = p.workspace + workspace_counters(p.workspace_words);
  float* weights = sums + p.tokens * p.q_heads * most_splits(p.kv_heads) * p.head_dim;
  return {sums, reinterpret_cast<Weight*>(weights), reinterpret_cast<unsigned*>(p.workspace)};
}

inline int64_t token_split_groups(const FusedAttentionDecodeParams& p) {
  return p.kv_heads * ceil_div(p.q_heads / p.kv_heads, kMaxSplitGroupQueries);
}

// How CTAs divide the work. A cluster has 2^rank_bits CTAs, of which each merges so many pieces of
// a query's sums; where CTAs take whole split-KV groups, no CTA range (or, with more tokens
// than lanes, no context) has more than so many positions more than an equal division.
struct Division {
  int64_t blocks;
  int rank_bits;
  int64_t rank_pieces;
  int item_bits;
  int slack_tokens;
};

inline SplitGrid make_split_grid(const FusedAttentionDecodeParams& p, const Division& division) {
  return {p.decode_meta,
          static_cast<int>(p.tokens),
          static_cast<int>(p.q_heads),
          static_cast<int>(p.q_heads / p.kv_heads),
          Divisor(token_split_groups(p)),
          Divisor(token_split_groups(p) / p.kv_heads),
          Divisor(most_splits(p.kv_heads)),
          Divisor(division.blocks),
          Divisor(division.rank_pieces),
          division.rank_bits,
          division.item_bits,
          static_cast<unsigned>(division.slack_tokens) >> division.item_bits,
          SplitCache(p.cache),
          {static_cast<const Bf16*>(p.q), p.q_stride, p.q_head_stride},
          {static_cast<const Bf16*>(p.k), p.k_stride, p.k_head_stride},
          {static_cast<const Bf16*>(p.v), p.v_stride, p.v_head_stride},
          {static_cast<Bf16*>(p.out), p.out_stride, p.out_head_stride}};
}

}  // namespace photon::cuda
