// How balanced attention deals the work of a step to CTAs: all KV tiles of a step stand in a line,
// query tile after query tile and head after head, and each CTA takes an equal range of them
// (balanced_plan_kernel writes where it begins). So it shares at most two query tiles with others:
// the first and the last.
#pragma once
#include "cuda/attention/balanced_tokens.cuh"

namespace photon::cuda {

// Goes through a CTA's range of the line, one partial tile after the other.
class CtaRange {
 public:
  __device__ CtaRange(const QueryTile* tiles, int kv_heads, const LineRange& range)
      : tiles_(tiles), kv_heads_(kv_heads), range_(range) {}

  // Moves to the next partial tile, or to none.
  __device__ void next(PartialTile& partial) {
    partial = {};
    while (range_.at < range_.end) {
      QueryTile tile = tiles_[range_.query_tile];
      while (tile.upto * kv_heads_ <= range_.at) tile = tiles_[++range_.query_tile];
      const int all = tile.upto - tile.before, from = range_.at - tile.before * kv_heads_,
                head = from / all, own = from - head * all,
                end = min(all, own + range_.end - range_.at), first = range_.at - own,
                first_cta = (first + kPartialCost) / range_.size;
      range_.at += end - own;
      if (end <= kPartialCost) continue;
      partial = {tile.first_token(),
                 tile.count(),
                 head,
                 max(own - kPartialCost, 0),
                 end - kPartialCost,
                 first_cta,
                 (first + all - 1) / range_.size - first_cta + 1,
                 tile.lengths};
      return;
    }
  }

  // What is left.
  __device__ const LineRange& rest() const { return range_; }

 private:
  const QueryTile* tiles_;
  int kv_heads_;
  LineRange range_;
};

}  // namespace photon::cuda
