// The ring of the linears for many tokens (stream_tall.cuh), and the warp that fills it.
#pragma once
#include "cuda/tall_tiles.cuh"

namespace photon::cuda::stream_linear::tall {

struct Ring {
  unsigned char* at;
  Barrier *full, *empty;  // by stage: all of it has landed; all warps of the cluster have read it
  int stages;
};

// The warp that fills the ring; one lane of it calls these.
template <int kRows>
struct Filler {
  static constexpr int kHalfBytes = kRows / 2 * kRowBytes;

  const Deal& deal;
  const Ring& ring;
  Walk next;  // the stage that is announced next
  int filled = 0;
  uint64_t weight_policy;

  __device__ Filler(const Deal& deal, const Ring& ring)
      : deal(deal),
        ring(ring),
        next(deal),
        weight_policy(deal.p.rereads_weight ? evict_normal() : evict_first()) {}

  // As many stages as the ring has get their weights, which no kernel before this one writes.
  __device__ void begin() {
    for (; filled < ring.stages && !next.is_done(); ++filled, next.advance()) {
      announce(filled);
      copy_rows(filled, next);
    }
  }

  // When x is there.
  __device__ void run() {
    Walk behind(deal);
    for (int stage = 0; stage < filled; ++stage, behind.advance()) copy_tokens(stage, behind);
    for (Stage at; !next.is_done(); next.advance(), at.advance(ring.stages)) {
      wait_barrier(&ring.empty[at.index], at.parity);
      announce(at.index);
      copy_tokens(at.index, next);
      copy_rows(at.index, next);
    }
  }

 private:
  __device__ unsigned char* place(int stage) const { return ring.at + stage * kStageBytes<kRows>; }

  __device__ void announce(int stage) const {
    arrive_expecting(&ring.full[stage], kStageBytes<kRows>);
  }

  __device__ void copy(const HalfTileMap& map, int stage, int offset, int row, int column,
                       bool to_both, uint64_t policy) const {
    const TensorPlace at{0, row, column / kSliceColumns};
    if (to_both) {
      tensor_copy_to(0b11, place(stage) + offset, &map.map, at, &ring.full[stage], policy);
    } else {
      tensor_copy(place(stage) + offset, &map.map, at, &ring.full[stage], policy);
    }
  }

  __device__ void copy_tokens(int stage, const Walk& walk) const {
    copy(deal.p.x, stage, 0, walk.token, walk.column, false, evict_last());
  }

  __device__ void copy_rows(int stage, const Walk& walk) const {
    const Params& p = deal.p;
    const int row = walk.row_tile * outputs_of<kRows>(p);
    const int second = p.is_swiglu ? p.n + row : row + kRows / 2;  // row of the second half
    if (p.is_paired) {
      copy(p.weight, stage, kXBytes + deal.rank * kHalfBytes, deal.rank == 0 ? row : second,
           walk.column, true, weight_policy);
      return;
    }
    copy(p.weight, stage, kXBytes, row, walk.column, false, weight_policy);
    if (p.is_swiglu)
      copy(p.weight, stage, kXBytes + kHalfBytes, second, walk.column, false, weight_policy);
  }
};

}  // namespace photon::cuda::stream_linear::tall
