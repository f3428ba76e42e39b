// The ring of the linears for many tokens (stream_tall.cuh), and the two warps that fill it: one
// with rows of the weight, the other with x.
#pragma once
#include "cuda/linear/tall_tiles.cuh"

namespace photon::cuda::stream_linear::tall {

constexpr int kFillers = 2;

struct Ring {
  unsigned char* at;
  Barrier *full, *empty;  // by stage: all of it has landed; all warps of the cluster have read it
  int stages;
};

// All lanes of such a warp together: copies its `bytes` of each stage as soon as there is room, by
// copy(where the stage is, its barrier, walk). A lane is elected anew for each stage: were it kept,
// the compiler would make a loop over lanes of each copy.
template <int kRows, typename Copy>
__device__ inline void fill(const Deal& deal, const Ring& ring, int bytes, const Copy& copy) {
  Stage at;
#pragma unroll 1
  for (Walk walk(deal); !walk.is_done(); walk.advance(), at.advance(ring.stages)) {
    if (!is_elected()) continue;
    Barrier* const full = &ring.full[at.index];
    wait_barrier(&ring.empty[at.index], at.parity ^ 1);
    arrive_expecting(full, bytes);
    copy(ring.at + at.index * kStageBytes<kRows>, full, walk);
  }
}

// No kernel before this one writes them.
template <int kRows>
__device__ inline void fill_rows(const Deal& deal, const Ring& ring) {
  constexpr int kHalfBytes = kRows / 2 * kRowBytes;
  const Params& p = deal.p;
  const uint64_t policy = p.rereads_weight ? evict_normal() : evict_first();
  fill<kRows>(deal, ring, kRows * kRowBytes,
              [&](unsigned char* stage, Barrier* full, const Walk& walk) {
                unsigned char* const rows = stage + kXBytes;
                const int row = walk.row_tile * outputs_of<kRows>(p),
                          second = p.is_swiglu ? p.n + row : row + kRows / 2,  // of the second half
                    slice = walk.column / kSliceColumns;
                if (p.is_paired) {
                  tensor_copy_to(0b11, rows + deal.rank * kHalfBytes, &p.weight.map,
                                 {0, deal.rank == 0 ? row : second, slice}, full, policy);
                  return;
                }
                tensor_copy(rows, &p.weight.map, {0, row, slice}, full, policy);
                if (p.is_swiglu)
                  tensor_copy(rows + kHalfBytes, &p.weight.map, {0, second, slice}, full, policy);
              });
}

// When x is there.
template <int kRows>
__device__ inline void fill_tokens(const Deal& deal, const Ring& ring) {
  const uint64_t policy = evict_last();
  fill<kRows>(deal, ring, kXBytes, [&](unsigned char* stage, Barrier* full, const Walk& walk) {
    tensor_copy(stage, &deal.p.x.map, {0, walk.token, walk.column / kSliceColumns}, full, policy);
  });
}

}  // namespace photon::cuda::stream_linear::tall
