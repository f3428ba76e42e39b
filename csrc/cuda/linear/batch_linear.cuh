// The linears of a batch of tokens, where a token need not have the bits that it has alone.
//
// A tile is 64 or 128 tokens by some rows of the weight: tokens are the left operand of the matrix
// instruction, 64 for each warp group that multiplies, and rows the right one, any multiple of 8,
// so that a CTA for each SM divides a weight nearly without rest. A CTA has one tile, or a part of
// its columns. One warp fills two rings in shared memory by tensor copies, one with rows, which
// come from memory, and one with x, which comes from L2 and has fewer stages; a stage is 64
// columns. SwiGLU has gate and up rows by turns, so that both of an output end side by side in one
// lane.
//
// A sum goes along its part of the columns, then parts are added in order. So it depends on the
// shape and on the step's number of tokens, never on what other tokens are.
#pragma once
#include "cuda/linear/batch_finish.cuh"
#include "cuda/linear/batch_tiles.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::batch {

// The warp that fills the rings of a batch's linears (batch_linear.cuh).

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
      const int first = tile.row_tile * kOutputs<kRows, kFinish>, k_block = tile.first_step + step;
      const TensorPlace from = kFinish == Finish::kSwiglu
                                   ? TensorPlace{k_block * kKBlockColumns, 0, first}
                                   : TensorPlace{0, first, k_block};
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

// The sums of a warp group's tokens. While a step is multiplied, the one before is given back.
template <int kBlocks, int kRows>
__device__ void multiply(const Params& p, const Tile& tile, const Rings<kBlocks, kRows>& rings,
                         int group, float (&sums)[kRows / 2]) {
  using R = Rings<kBlocks, kRows>;
  const int lane = threadIdx.x % kWarpSize;
  Stage x_at, weight_at;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_barrier(&rings.weight_full[weight_at.index], weight_at.parity);
    wait_barrier(&rings.x_full[x_at.index], x_at.parity);
    const RowTileFragment x(rings.x + x_at.index * R::kXBytes +
                            group * kBatchBlockTokens * kBatchRowBytes),
        rows(rings.weight + weight_at.index * R::kWeightBytes);
    warpgroup_begin();
#pragma unroll
    for (int depth = 0; depth < kKBlockColumns / 16; ++depth)
      multiply_rows(sums, x, rows, depth, step > 0 || depth > 0);
    warpgroup_commit();
    if (step > 0) {
      warpgroup_wait_but<1>();
      if (lane == 0) arrive(&rings.empty[(step - 1) % kBatchMaxStages]);
    }
    x_at.advance(p.x_stages);
    weight_at.advance(p.weight_stages);
  }
  warpgroup_wait_but<0>();
  warpgroup_settle(sums);
}

// The threads that multiply: their sums, with those of the other CTA of a cluster, to outputs.
template <int kBlocks, int kRows, Finish kFinish>
__device__ void multiply_and_finish(const Params& p, const Tile& tile,
                                    const Rings<kBlocks, kRows>& rings, int group, int active) {
  float sums[kRows / 2];
  multiply<kBlocks, kRows>(p, tile, rings, group, sums);
  wait_for_earlier();
  unsigned char* const shared = rings.weight;
  // All have read the rings, which are written over.
  if constexpr (kFinish != Finish::kPartial) sync_threads(1, tile.live * kWarpgroupThreads);
  if constexpr (kExchanges<kBlocks, kFinish>) {
    if (p.splits > 1) {
      using Sums = Exchange<kBlocks, kRows>;
      const Sums exchange(shared, group);
      exchange.leave(sums);
      sync_cluster();
      exchange.add(sums);
      Writer<kRows, kFinish, Sums::kMine>{p, tile, group, active,
                                          exchange.is_second ? Sums::kMine : 0}
          .run(sums, shared + Sums::kBytes);
      return;
    }
  }
  Writer<kRows, kFinish, kRows / 8>{p, tile, group, active, 0}.run(sums, shared);
}

template <int kBlocks, int kRows, Finish kFinish>
__device__ void run_block(const Params& p) {
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  const Tile tile(p, kTokens<kBlocks>, active);
  if (tile.live == 0) return wait_for_earlier();  // and so does the other CTA of a cluster
  const Rings<kBlocks, kRows> rings(p, dynamic_shared());
  if (threadIdx.x < kBatchMaxStages) {
    init_barrier(&rings.weight_full[threadIdx.x], 1);
    init_barrier(&rings.x_full[threadIdx.x], 1);
    init_barrier(&rings.empty[threadIdx.x], tile.live * (kWarpgroupThreads / kWarpSize));
  }
  if (threadIdx.x < kWarpSize) fence_barriers();
  __syncthreads();
  const bool meets = kExchanges<kBlocks, kFinish> && p.splits > 1;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (group < tile.live) {
    multiply_and_finish<kBlocks, kRows, kFinish>(p, tile, rings, group, active);
  } else {
    if (group == kBlocks) {
      Filler<kBlocks, kRows, kFinish>(p, tile, rings).run();
    } else {
      wait_for_earlier();
    }
    if (meets) sync_cluster();
  }
  if (meets) sync_cluster();  // nobody reaches into a CTA that has ended
}

}  // namespace photon::cuda::batch
