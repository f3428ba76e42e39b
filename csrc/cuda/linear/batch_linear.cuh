// The linears of a batch of tokens, where a token need not have the bits that it has alone.
//
// A tile is 64 or 128 tokens by some rows of the weight: tokens are the left operand of the matrix
// instruction, 64 for each warp group that multiplies, and rows the right one, any multiple of 8,
// so that a CTA for each SM divides a weight nearly without rest. A CTA has one tile, or a part of
// its columns. A feed fills two rings in shared memory, one with rows, which come from memory, and
// one with x, which comes from L2; a stage is a K block: 128 bytes, of bfloat16 64 columns. SwiGLU
// has gate and up rows by turns, so that both of an output end side by side in one lane.
//
// A sum goes along its part of the columns, then parts are added in order. So it depends on the
// shape and on the step's number of tokens, never on what other tokens are.
#pragma once
#include "cuda/linear/batch_finish.cuh"
#include "cuda/linear/batch_tiles.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::batch {

// The sums of a warp group's tokens. While a step is multiplied, the one before is given back.
template <int kBlocks, int kRows>
__device__ void multiply(const Params& p, const Tile& tile, const Rings<kBlocks, kRows>& rings,
                         int group, float (&sums)[kRows / 2]) {
  using R = Rings<kBlocks, kRows>;
  const RowTileFragment x(rings.x + group * kBatchBlockTokens * kBatchRowBytes), rows(rings.weight);
  const bool is_first = threadIdx.x % kWarpSize == 0;
  Stage x_at, weight_at;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_barrier(&rings.weight_full[weight_at.index], weight_at.parity);
    wait_barrier(&rings.x_full[x_at.index], x_at.parity);
    warpgroup_begin();
#pragma unroll
    for (int depth = 0; depth < kKBlockColumns / 16; ++depth)
      multiply_rows(sums, x.after(x_at.index * R::kXBytes),
                    rows.after(weight_at.index * R::kWeightBytes), depth, step > 0 || depth > 0);
    warpgroup_commit();
    if (step > 0) {
      warpgroup_wait_but<1>();
      if (is_first) arrive(&rings.empty[(step - 1) % kBatchMaxStages]);
    }
    x_at.advance(p.x_stages);
    weight_at.advance(p.weight_stages);
  }
  warpgroup_wait_but<0>();
  warpgroup_settle(sums);
}

// The threads that multiply: their sums, with those of the other CTA of a cluster, to outputs.
template <int kBlocks, int kRows, Finish kFinish, typename Feed>
__device__ void multiply_and_finish(const Feed& feed, int group, int active) {
  const Params& p = feed.p;
  const Tile& tile = feed.tile;
  float sums[kRows / 2];
  feed.multiply(group, sums);
  wait_for_earlier();
  unsigned char* const shared = feed.rings.weight;
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

// `Feed`: what brings rows and x into the rings, and how they are multiplied (DenseFeed of
// batch_linear.cu, Fp8Feed of batch_fp8.cuh, or StoredFeed of batch_stored.cuh).
template <int kBlocks, int kRows, Finish kFinish, template <int, int, Finish> typename Feed>
__device__ void run_block(const typename Feed<kBlocks, kRows, kFinish>::Params& p) {
  using F = Feed<kBlocks, kRows, kFinish>;
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  const Tile tile(p, kTokens<kBlocks>, active);
  if (tile.live == 0) return wait_for_earlier();  // and so does the other CTA of a cluster
  const F feed(p, tile, dynamic_shared());
  feed.rings.init(tile.live, F::kFillers);
  feed.init();
  if (threadIdx.x < kWarpSize) fence_barriers();
  __syncthreads();
  const bool meets = kExchanges<kBlocks, kFinish> && p.splits > 1;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (group < tile.live) {
    feed.begin_multiplying();
    multiply_and_finish<kBlocks, kRows, kFinish>(feed, group, active);
  } else {
    if (group < kBlocks) {
      wait_for_earlier();
    } else {
      feed.run(group - kBlocks);
    }
    if (meets) sync_cluster();
  }
  if (meets) sync_cluster();  // nobody reaches into a CTA that has ended
}

}  // namespace photon::cuda::batch
