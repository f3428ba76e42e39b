// Which tile ranges a CTA of split attention takes, one after the other: those of its share (see
// CtaSplits); or, where shares would cut split-KV groups, and no context is longer than a share,
// whole split-KV groups, longest first, there and back over the CTAs by turns, so that a CTA with a
// long context has short ones, too. A split-KV group that is not cut needs no reduction.
#pragma once
#include "cuda/split_work.cuh"

namespace photon::cuda {

// kMany: for more tokens than lanes. With fewer there is no code for an order.
template <bool kMany>
class CtaRanges {
 public:
  static constexpr int kClasses = kWarpSize;  // of lengths; the last one has the shortest

  // `counts` is shared memory of the warp, which is free afterwards. All lanes of all warps must
  // call this and the other functions; all warps get the same.
  __device__ CtaRanges(const SplitGrid& grid, const CtaSplits& share, unsigned (&counts)[kClasses])
      : grid_(grid), share_(share) {
    if (is_by_length()) count_tokens(counts);
  }

  __device__ RangeCursor first(const TokenCut& own) {
    if (is_by_length()) return next_whole();
    RangeCursor range;
    range.seek<kMany>(grid_, share_, own);
    return range;
  }

  __device__ void advance(RangeCursor& range) {
    if (is_by_length()) {
      range = next_whole();
    } else {
      range.next(grid_, share_);
    }
  }

  // How many CTAs have tile ranges of the split-KV group.
  __device__ int ranges_of(const RangeCursor& range) const { return range.ranges(share_); }

 private:
  __device__ bool is_by_length() const { return kMany && share_.by_length; }

  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarpSize); }

  // Where a context comes in the order; -1: nowhere.
  __device__ int class_of(int32_t length) const {
    const int items = static_cast<int>(grid_.items_of(length));
    return length > 0 ? kClasses - min(items, kClasses) : -1;
  }

  __device__ void count_tokens(unsigned (&counts)[kClasses]) {
    counts[lane()] = 0;
    __syncwarp();
#pragma unroll 1
    for (int from = 0; from < grid_.tokens; from += LaneLengths::kTokens) {
      const LaneLengths lengths(grid_, from);
#pragma unroll
      for (const int32_t length : lengths.of) {
        if (length > 0) atomicAdd(&counts[class_of(length)], 1u);
      }
    }
    __syncwarp();
    count_ = counts[lane()];
    __syncwarp();
    unsigned end = count_;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const unsigned before = __shfl_up_sync(kFullWarp, end, offset);
      if (lane() >= offset) end += before;
    }
    first_ = end - count_;
    split_groups_ = __shfl_sync(kFullWarp, end, kWarpSize - 1) * grid_.token_split_groups.of;
  }

  // CTA c of n takes number c, then 2n - 1 - c, 2n + c and so on.
  __device__ RangeCursor next_whole() {
    const unsigned blocks = grid_.blocks.of;
    const unsigned number =
        turn_ % 2 == 0 ? turn_ * blocks + blockIdx.x : (turn_ + 1) * blocks - 1 - blockIdx.x;
    ++turn_;
    if (number >= split_groups_) return RangeCursor::none(grid_);
    const unsigned token = grid_.token_split_groups.divides(number);
    return RangeCursor::whole(grid_, find_token(token),
                              number - token * grid_.token_split_groups.of);
  }

  // The token that comes at this place in the order; those of a class by their index.
  __device__ int find_token(unsigned place) const {
    const int own_class =
        __ffs(static_cast<int>(__ballot_sync(kFullWarp, place - first_ < count_))) - 1;
    unsigned left = place - __shfl_sync(kFullWarp, first_, own_class);
#pragma unroll 1
    for (int from = 0; from < grid_.tokens; from += LaneLengths::kTokens) {
      const LaneLengths lengths(grid_, from);
#pragma unroll
      for (int j = 0; j < LaneLengths::kOfLane; ++j) {
        const bool is_there = class_of(lengths.of[j]) == own_class;
        const unsigned there = __ballot_sync(kFullWarp, is_there);
        const unsigned before = __popc(there & ((1u << lane()) - 1)), all = __popc(there);
        if (left < all) {
          const unsigned found = __ballot_sync(kFullWarp, is_there && before == left);
          return from + j * kWarpSize + __ffs(static_cast<int>(found)) - 1;
        }
        left -= all;
      }
    }
    return grid_.tokens;
  }

  const SplitGrid& grid_;
  const CtaSplits& share_;
  unsigned first_ = 0, count_ = 0;  // of the lane's class: its first place in the order, its tokens
  unsigned split_groups_ = 0;       // of all live tokens
  unsigned turn_ = 0;
};

}  // namespace photon::cuda
