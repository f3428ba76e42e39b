// Which tile ranges a CTA of split attention takes, one after the other: those of its share (see
// CtaSplits). Of many tokens whole split-KV groups go longest first, there and back over the CTAs
// by turns, so that a CTA with a long context has short ones, too.
#pragma once
#include "cuda/split_work.cuh"

namespace photon::cuda {

// kMany: for more tokens than lanes. With fewer there is no code for an order.
template <bool kMany>
class CtaRanges {
 public:
  // All threads of the CTA must call it. `order` is shared memory that nobody else writes.
  __device__ CtaRanges(const SplitGrid& grid, const CtaSplits& share, TokenOrder& order)
      : grid_(grid), share_(share), order_(order) {}

  static __device__ void sort(const SplitGrid& grid, const CtaSplits& share, TokenOrder& order) {
    if (!(kMany && share.of_split_groups) || share.is_equal) return;
    if (threadIdx.x < kWarpSize) order.sort(grid);
    __syncthreads();
  }

  __device__ RangeCursor first(const TokenCut& own) const {
    RangeCursor range;
    if (takes_turns()) {
      open_turn(range, 0);
    } else {
      range.seek<kMany>(grid_, share_, own);
    }
    return range;
  }

  __device__ void advance(RangeCursor& range) const {
    if (takes_turns()) {
      open_turn(range, range.turn + 1);
    } else {
      range.next(grid_, share_);
    }
  }

  // How many CTAs have tile ranges of the split-KV group.
  __device__ int ranges_of(const RangeCursor& range) const { return range.ranges(share_); }

 private:
  __device__ bool takes_turns() const { return kMany && share_.of_split_groups; }

  // CTA c of n takes number c, then 2n - 1 - c, 2n + c and so on.
  __device__ void open_turn(RangeCursor& range, unsigned turn) const {
    const unsigned blocks = grid_.blocks.of;
    const unsigned number =
        turn % 2 == 0 ? turn * blocks + blockIdx.x : (turn + 1) * blocks - 1 - blockIdx.x;
    const unsigned place = grid_.token_split_groups.divides(number);
    range.turn = turn;
    if (number < share_.end) {
      range.open_whole(grid_, share_.is_equal ? place : order_.tokens[place],
                       number - place * grid_.token_split_groups.of);
    } else {
      range.close(grid_);
    }
  }

  const SplitGrid& grid_;
  const CtaSplits& share_;
  TokenOrder& order_;
};

}  // namespace photon::cuda
