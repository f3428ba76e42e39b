// The items of an exact step of balanced attention. Its plan lists entries, query tiles whole or
// part by part, in the order in which CTAs take them; an item is an entry for one KV head.
#pragma once
#include "common/balanced_parts.h"
#include "cuda/attention/balanced_tokens.cuh"

namespace photon::cuda {

class Items {
 public:
  // `all`: of the plan, whose `end` is their number.
  __device__ Items(const QueryTile* entries, int kv_heads, const LineRange& all)
      : entries_(entries), kv_heads_(kv_heads), count_(all.end) {}

  __device__ int count() const { return count_; }

  // Behind the last one: none.
  __device__ PartialTile of(int index) const {
    if (index >= count_) return {};
    const int head = index % kv_heads_;
    const QueryTile entry = entries_[index / kv_heads_];
    const int kv_tiles = count_kv_tiles(entry.lengths);
    const bool is_whole = entry.upto - entry.before == kv_tiles;
    return {entry.first_token(),
            entry.count(),
            head,
            entry.before,
            entry.upto,
            entry.place * kv_heads_ + head,
            is_whole ? 1 : count_parts(kv_tiles),
            entry.lengths};
  }

 private:
  const QueryTile* entries_;
  int kv_heads_, count_;
};

}  // namespace photon::cuda
