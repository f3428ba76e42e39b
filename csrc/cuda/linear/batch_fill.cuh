// The warp that fills the rings of a batch's linears (batch_linear.cuh).
#pragma once
#include "cuda/linear/batch_tiles.cuh"

namespace photon::cuda::batch {

// A step that has been multiplied leaves its place in both rings, so one barrier tells of it.
template <int kBlocks, int kRows, Finish kFinish>
struct Filler {
  using R = Rings<kBlocks, kRows>;

  const Params& p;
  const Tile& tile;
  const R& rings;
  uint64_t weight_policy = evict_first(), x_policy = evict_last();

  __device__ Filler(const Params& p, const Tile& tile, const R& rings)
      : p(p), tile(tile), rings(rings) {}

  // All lanes. Rows at once: no kernel before this one writes them.
  __device__ void run() const {
    Stage x_at, weight_at;
    for (int i = 0; i < min(p.weight_stages, tile.steps); ++i) copy_rows(i, weight_at);
    wait_for_earlier();
    fence_async_global();
    for (int i = 0; i < min(p.x_stages, tile.steps); ++i) copy_tokens(i, x_at);
#pragma unroll 1
    for (int i = 0; i + min(p.x_stages, p.weight_stages) < tile.steps; ++i) {
      wait_barrier(&rings.empty[i % kBatchMaxStages], i / kBatchMaxStages % 2);
      if (i + p.x_stages < tile.steps) copy_tokens(i + p.x_stages, x_at);
      if (i + p.weight_stages < tile.steps) copy_rows(i + p.weight_stages, weight_at);
    }
    __syncwarp();
  }

 private:
  // A lane is elected anew for each copy: were it kept, the compiler would make a loop over lanes
  // of each.
  __device__ void copy_rows(int step, Stage& at) const {
    if (is_elected()) {
      const int first = tile.row_tile * kOutputs<kRows, kFinish>, slice = tile.first_step + step;
      const TensorPlace from = kFinish == Finish::kSwiglu
                                   ? TensorPlace{slice * kSliceColumns, 0, first}
                                   : TensorPlace{0, first, slice};
      Barrier* const full = &rings.weight_full[at.index];
      arrive_expecting(full, R::kWeightBytes);
      tensor_copy(rings.weight + at.index * R::kWeightBytes, &p.weight.map, from, full,
                  weight_policy);
    }
    at.advance(p.weight_stages);
  }

  __device__ void copy_tokens(int step, Stage& at) const {
    if (is_elected()) {
      Barrier* const full = &rings.x_full[at.index];
      arrive_expecting(full, R::kXBytes);
      tensor_copy(rings.x + at.index * R::kXBytes, &p.x.map,
                  {0, tile.first_token, tile.first_step + step}, full, x_policy);
    }
    at.advance(p.x_stages);
  }
};

}  // namespace photon::cuda::batch
