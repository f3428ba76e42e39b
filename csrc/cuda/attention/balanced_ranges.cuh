// How balanced attention deals the work of a step to CTAs: all KV tiles of a step stand in a line,
// query tile after query tile and head after head, and each CTA takes an equal range of them
// (balanced_plan_kernel writes where it begins). So it shares at most two query tiles with others:
// the first and the last.
#pragma once
#include "cuda/attention/balanced_tokens.cuh"

namespace photon::cuda {

// Where the query tiles of a step are to be read, and how many KV tiles stand before each of them.
struct QueryTileLine {
  const QueryTile* tiles;
  const int32_t* before;
  int kv_heads;
};

// Goes through a CTA's range of the line, one partial tile after the other.
class CtaRange {
 public:
  __device__ CtaRange(const QueryTileLine& line, const LineRange& range)
      : line_(line), range_(range) {}

  // Moves to the next partial tile, or to none.
  __device__ void next(PartialTile& partial) {
    partial = {};
    while (range_.at < range_.end) {
      while (line_.before[range_.query_tile + 1] * line_.kv_heads <= range_.at) ++range_.query_tile;
      const int before = line_.before[range_.query_tile],
                all = line_.before[range_.query_tile + 1] - before,
                from = range_.at - before * line_.kv_heads, head = from / all,
                own = from - head * all, end = min(all, own + range_.end - range_.at),
                first = range_.at - own, first_cta = (first + kPartialCost) / range_.size;
      range_.at += end - own;
      if (end <= kPartialCost) continue;
      const QueryTile tile = line_.tiles[range_.query_tile];
      partial = {tile.first_token(),
                 tile.count(),
                 head,
                 all - kPartialCost,
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
  QueryTileLine line_;
  LineRange range_;
};

}  // namespace photon::cuda
