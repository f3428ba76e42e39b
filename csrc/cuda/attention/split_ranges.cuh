// Which tile ranges a CTA of split attention takes, one after the other: those of its CTA range
// (see CtaSplits). Of many tokens whole split-KV groups go longest first, there and back over the
// CTAs by turns, so that a CTA with a long context has short ones, too.
#pragma once
#include "cuda/attention/split_work.cuh"

namespace photon::cuda {

// kMany: for more tokens than lanes. With fewer there is no code for an order.
template <bool kMany>
class CtaRanges {
 public:
  // Comes first, where lengths differ. All threads of the CTA must call it. `order` is shared
  // memory that nobody else writes.
  __device__ static void make_order(const SplitGrid& grid, const CtaSplits& cta_splits,
                                    TokenOrder& order) {
    if (!takes_turns(cta_splits) || cta_splits.is_equal) return;
    if (threadIdx.x < kWarpSize) order.sort(grid);
    __syncthreads();
  }

  __device__ CtaRanges(const SplitGrid& grid, const CtaSplits& cta_splits, const TokenOrder& order)
      : grid_(grid), cta_splits_(cta_splits), order_(order) {}

  __device__ RangeCursor first(const TokenCut& own) const {
    RangeCursor range;
    if (takes_turns(cta_splits_)) {
      open_turn(range, 0);
    } else {
      range.seek<kMany>(grid_, cta_splits_, own);
    }
    return range;
  }

  __device__ void advance(RangeCursor& range) const {
    if (takes_turns(cta_splits_)) {
      open_turn(range, range.turn + 1);
    } else {
      range.next(grid_, cta_splits_);
    }
  }

  // How many CTAs have tile ranges of the split-KV group.
  __device__ int ranges_of(const RangeCursor& range) const { return range.ranges(cta_splits_); }

 private:
  __device__ static bool takes_turns(const CtaSplits& cta_splits) {
    return kMany && cta_splits.of_split_groups;
  }

  // CTA c of n takes number c, then 2n - 1 - c, 2n + c and so on.
  __device__ void open_turn(RangeCursor& range, unsigned turn) const {
    const unsigned blocks = grid_.blocks.of;
    const unsigned number =
        turn % 2 == 0 ? turn * blocks + blockIdx.x : (turn + 1) * blocks - 1 - blockIdx.x;
    const unsigned place = grid_.token_split_groups.divides(number);
    range.turn = turn;
    if (number < cta_splits_.end) {
      range.open_whole(grid_, cta_splits_.is_equal ? place : order_.tokens[place],
                       number - place * grid_.token_split_groups.of);
    } else {
      range.close(grid_);
    }
  }

  const SplitGrid& grid_;
  const CtaSplits& cta_splits_;
  const TokenOrder& order_;
};

}  // namespace photon::cuda
