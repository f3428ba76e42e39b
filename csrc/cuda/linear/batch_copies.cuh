// What brings rows and x into the rings of a batch's linears (batch_linear.cuh) where both are
// multiplied as they lie in memory.
#pragma once
#include "cuda/linear/batch_linear.cuh"

namespace photon::cuda::batch {

// One warp fills both rings. A step that has been multiplied leaves its place in both, so one
// barrier tells of it.
template <int kBlocks, int kRows, Finish kFinish>
struct CopyFeed {
  using R = Rings<kBlocks, kRows>;
  static constexpr int kThreads = kWarpSize;  // besides those that multiply
  static constexpr int kFillers = 1;          // arrivals that fill a stage of rows

  const Params& p;
  const Tile& tile;
  const R rings;

  __device__ CopyFeed(const Params& p, const Tile& tile, unsigned char* shared)
      : p(p), tile(tile), rings(p, shared) {}
  __device__ void init() const {}
  __device__ void begin_multiplying() const {}

  // All lanes. Rows at once: no kernel before this one writes them.
  __device__ void run(int) const {
    const uint64_t weight_policy = evict_first(), x_policy = evict_last();
    Stage x_at, weight_at;
    for (int i = 0; i < min(p.weight_stages, tile.steps); ++i)
      copy_rows(i, weight_at, weight_policy);
    wait_for_earlier();
    fence_async_global();
    for (int i = 0; i < min(p.x_stages, tile.steps); ++i) copy_tokens(i, x_at, x_policy);
#pragma unroll 1
    for (int i = 0; i + min(p.x_stages, p.weight_stages) < tile.steps; ++i) {
      wait_barrier(&rings.empty[i % kBatchMaxStages], i / kBatchMaxStages % 2);
      if (i + p.x_stages < tile.steps) copy_tokens(i + p.x_stages, x_at, x_policy);
      if (i + p.weight_stages < tile.steps)
        copy_rows(i + p.weight_stages, weight_at, weight_policy);
    }
    __syncwarp();
  }

 private:
  // A lane is elected anew for each copy: were it kept, the compiler would make a loop over lanes
  // of each.
  __device__ void copy_rows(int step, Stage& at, uint64_t policy) const {
    if (is_elected()) {
      Barrier* const full = &rings.weight_full[at.index];
      arrive_expecting(full, R::kWeightBytes);
      tensor_copy(rings.weight + at.index * R::kWeightBytes, &p.weight.map,
                  place_of_rows<kRows, kFinish>(tile.row_tile, tile.first_step + step), full,
                  policy);
    }
    at.advance(p.weight_stages);
  }

  __device__ void copy_tokens(int step, Stage& at, uint64_t policy) const {
    if (is_elected()) rings.copy_tokens(p, tile, step, at.index, policy);
    at.advance(p.x_stages);
  }
};

}  // namespace photon::cuda::batch
