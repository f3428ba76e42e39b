// The Hopper linears for many tokens.
//
// A tile is 128 tokens by some rows of the weight. Two warp groups multiply it, 64 tokens each: the
// tokens are the left operand of the matrix instruction, the rows the right one. Two warps of a
// third group, which leaves most of its registers to the others, fill a ring in shared memory by
// tensor copies; a stage is 64 columns of the tile's tokens and rows. A CTA has an SM to itself and
// takes one tile after the other, those of the same rows one behind the other, so that weights come
// from memory once. The ring goes on filling while a tile is written out.
//
// A tile is summed K block by K block: of K block j the columns 64 j + 512 c, K chunk after K
// chunk, in one running sum; at the K block's end that is added to the total. These are the sums of
// the kernels for fewer tokens, in their order (stream_common.cuh). With split-K a CTA takes one
// part of the columns after the other, and keeps the first part's total in shared memory meanwhile.
//
// Where x is to be normalized, a small kernel in front (large_linear.cu) multiplies it by the gains
// and leaves the scale of each token.
//
// The two CTAs of a cluster have the same rows and different tokens: each copies half of the rows
// into the shared memory of both. A stage is filled again when the groups of both have read it.
#pragma once
#include "cuda/linear/large_finish.cuh"
#include "cuda/linear/large_tiles.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear::large {

// The ring of the linears for many tokens (large_linear.cuh), and the two warps that fill it: one
// with rows of the weight, the other with x.

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
                    k_block = walk.column / kKBlockColumns;
                if (p.is_paired) {
                  tensor_copy_to(0b11, rows + deal.rank * kHalfBytes, &p.weight.map,
                                 {0, deal.rank == 0 ? row : second, k_block}, full, policy);
                  return;
                }
                tensor_copy(rows, &p.weight.map, {0, row, k_block}, full, policy);
                if (p.is_swiglu)
                  tensor_copy(rows + kHalfBytes, &p.weight.map, {0, second, k_block}, full, policy);
              });
}

// When x is there.
template <int kRows>
__device__ inline void fill_tokens(const Deal& deal, const Ring& ring) {
  const uint64_t policy = evict_last();
  fill<kRows>(deal, ring, kXBytes, [&](unsigned char* stage, Barrier* full, const Walk& walk) {
    tensor_copy(stage, &deal.p.x.map, {0, walk.token, walk.column / kKBlockColumns}, full, policy);
  });
}

// A warp group's sums of its 64 tokens, as seen from a lane.
template <int kRows>
struct Multiplier {
  static constexpr int kSums = kRows / 2;

  const Params& p;
  const Ring& ring;
  int group;
  Stage at;
  float total[kSums];

  __device__ Multiplier(const Params& p, const Ring& ring)
      : p(p), ring(ring), group(static_cast<int>(threadIdx.x) / kWarpgroupThreads) {}

  // The total of one part of the columns.
  __device__ void run(int part) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = 0.0f;
    const int columns = end_of_part(p, part) - part * p.k_each;
#pragma unroll 1
    for (int before = 0; before < min(columns, kKChunk); before += kKBlockColumns) {
      float sum[kSums];
      add_k_block(sum, (columns - before + kKChunk - 1) / kKChunk);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += sum[i];
    }
  }

 private:
  // While a stage is multiplied, the one before it is done and is given back.
  __device__ void add_k_block(float (&sum)[kSums], int steps) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_barrier(&ring.full[at.index], at.parity);
      unsigned char* const stage = ring.at + at.index * kStageBytes<kRows>;
      const RowTileFragment x(stage + group * kGroupXBytes), rows(stage + kXBytes);
      warpgroup_begin();
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth)
        multiply_rows(sum, x, rows, depth, step > 0 || depth > 0);
      warpgroup_commit();
      if (step > 0) {
        warpgroup_wait_but<1>();
        give_back(before);
      }
      before = at.index;
      at.advance(ring.stages);
    }
    warpgroup_wait_but<0>();
    warpgroup_settle(sum);
    give_back(before);
  }

  __device__ void give_back(int stage) const {
    const int lane = threadIdx.x % kWarpSize;
    if (!p.is_paired) {
      if (lane == 0) arrive(&ring.empty[stage]);
    } else if (lane < 2) {
      arrive_in_block(&ring.empty[stage], lane, 0);
    }
  }
};

// A lane's totals of the first part of the columns, while it sums the second.
template <int kSums>
__device__ inline void keep(const float (&total)[kSums], float* kept) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) kept[i * kMultipliers + threadIdx.x] = total[i];
}

template <int kSums>
__device__ inline void add_kept(float (&total)[kSums], const float* kept) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) total[i] = kept[i * kMultipliers + threadIdx.x] + total[i];
}

// The threads that multiply: tile by tile.
template <int kRows, Epilogue kEpilogue>
__device__ void multiply_tiles(const Deal& deal, const Ring& ring, float* kept, int active) {
  const Params& p = deal.p;
  Multiplier<kRows> multiplier(p, ring);
  const Finish<kRows, kEpilogue> finish{p, active};
  wait_for_earlier();
#pragma unroll 1
  for (int unit = deal.first; unit < deal.units; unit += deal.clusters) {
    if constexpr (kEpilogue == Epilogue::kAdd) {
#pragma unroll 1
      for (int part = 0; part < p.split; ++part) {
        if (part > 0) keep(multiplier.total, kept);
        multiplier.run(part);
      }
      if (p.split > 1) add_kept(multiplier.total, kept);
    } else {
      multiplier.run(0);
    }
    finish.run(multiplier.total, deal.token(unit), deal.row_tile(unit));
    __syncwarp();  // for the instructions of the next tile
  }
}

template <int kRows, Epilogue kEpilogue>
__device__ void run_block(const Params& p) {
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  unsigned char* const shared = dynamic_shared();
  Barrier* const barriers = reinterpret_cast<Barrier*>(shared + p.stages * kStageBytes<kRows>);
  const Ring ring{shared, barriers, barriers + kMaxStages, p.stages};
  float* const kept = reinterpret_cast<float*>(barriers + 2 * kMaxStages);
  const Deal deal(p, active);
  const int i = static_cast<int>(threadIdx.x);
  if (i < p.stages) {
    init_barrier(&ring.full[i], kFillers);
    init_barrier(&ring.empty[i], kMultipliers / kWarpSize * deal.ctas);
  }
  if (i == kMultipliers) {
    prefetch_row_tile_map(p.weight);
    prefetch_row_tile_map(p.x);
  }
  if (i < kWarpSize) fence_barriers();
  __syncthreads();
  if (p.is_paired) {
    enter_cluster();
    meet_cluster();  // the others' barriers are there
  }
  if (i < kMultipliers) {
    grow_registers<kSumRegisters>();
    multiply_tiles<kRows, kEpilogue>(deal, ring, kept, active);
  } else {
    shrink_registers<kFillRegisters>();
    const int warp = (i - kMultipliers) / kWarpSize;
    if (warp == 0) fill_rows<kRows>(deal, ring);
    wait_for_earlier();
    if (warp == 1) {
      fence_async_global();
      fill_tokens<kRows>(deal, ring);
    }
    __syncwarp();
  }
  if (p.is_paired) {
    leave_cluster();
    meet_cluster();  // nobody reaches into a CTA that has ended
  }
}

}  // namespace photon::cuda::stream_linear::large
