// Linears of a batch of tokens (batch_linear.cuh): params, the part of the work that a CTA has, and
// how its shared memory is divided.
#pragma once
#include "cuda/bf16.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear/batch_plan.h"
#include "cuda/linear/ring_stage.cuh"
#include "cuda/row_tile_map.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::batch {

struct Params {
  RowTileMap x;       // boxes of one K block of a tile's tokens
  RowTileMap weight;  // boxes of one K block of a tile's rows
  Bf16* out;          // [tokens, n]; not kPartial
  float* partial;     // kPartial: [splits, tokens, n]
  const Bf16* bias;   // a value per row of the weight, or null; not kPartial
  const int32_t* counts;
  int64_t out_stride;
  int tokens, n;
  int steps;                    // K blocks, of all parts
  int unit;                     // K blocks that parts of the columns consist of
  int splits;                   // parts of the columns; kOutput: two are a cluster
  int token_tiles, row_tiles;   // CTAs behind all of them have no work
  int x_stages, weight_stages;  // of the rings
};

static_assert(kBatchBlockTokens == kWarpgroupRows && kBatchRowBytes == kKBlockColumns * 2);

template <int kBlocks>
constexpr int kTokens = kBlocks * kBatchBlockTokens;
template <int kBlocks>
constexpr int kMultipliers = kBlocks * kWarpgroupThreads;

// Whether two parts of the columns may meet in a cluster.
template <int kBlocks, Finish kFinish>
constexpr bool kExchanges = kFinish == Finish::kOutput && kBlocks == 2;

// The columns of out that a tile of so many rows has.
template <int kRows, Finish kFinish>
constexpr int kOutputs = kFinish == Finish::kSwiglu ? kRows / 2 : kRows;

// Where the rows of a tile begin in the weight's map, at this K block: 128 bytes of each.
template <int kRows, Finish kFinish>
__device__ inline TensorPlace place_of_rows(int row_tile, int k_block) {
  const int first = row_tile * kOutputs<kRows, kFinish>;
  return kFinish == Finish::kSwiglu ? TensorPlace{k_block * kKBlockColumns, 0, first}
                                    : TensorPlace{0, first, k_block};
}

// Of a CTA: its part of the columns, as K blocks, and its tile. `live`: blocks that have tokens.
struct Tile {
  int part, first_token, row_tile, first_step, steps, live;

  __device__ Tile(const Params& p, int tokens, int active) {
    const int unit = static_cast<int>(blockIdx.x) / p.splits;
    part = static_cast<int>(blockIdx.x) % p.splits;
    row_tile = unit / p.token_tiles;
    first_token = unit % p.token_tiles * tokens;
    const int units = p.steps / p.unit;
    first_step = units * part / p.splits * p.unit;
    steps = units * (part + 1) / p.splits * p.unit - first_step;
    const int left = row_tile < p.row_tiles ? max(min(active - first_token, tokens), 0) : 0;
    live = (left + kBatchBlockTokens - 1) / kBatchBlockTokens;
  }
};

// Shared memory: rows' ring | x's ring | barriers. In front of them a feed may have more. After the
// products: what the other CTA of a cluster is to add, then outputs.
template <int kBlocks, int kRows>
struct Rings {
  static constexpr int kWeightBytes = kRows * kBatchRowBytes;
  static constexpr int kXBytes = kTokens<kBlocks> * kBatchRowBytes;

  unsigned char *weight, *x;
  Barrier *weight_full, *x_full;  // by stage: it has landed
  Barrier* empty;                 // by step, modulo kBatchMaxStages: all warps have multiplied it

  __device__ Rings(const Params& p, unsigned char* shared)
      : weight(shared), x(shared + p.weight_stages * kWeightBytes) {
    weight_full = reinterpret_cast<Barrier*>(x + p.x_stages * kXBytes);
    x_full = weight_full + kBatchMaxStages;
    empty = x_full + kBatchMaxStages;
  }

  // `live`: blocks of 64 tokens that are multiplied; `fillers`: arrivals that fill a stage of rows.
  __device__ void init(int live, int fillers) const {
    const int i = threadIdx.x;
    if (i >= kBatchMaxStages) return;
    init_barrier(&weight_full[i], fillers);
    init_barrier(&x_full[i], 1);
    init_barrier(&empty[i], live * (kWarpgroupThreads / kWarpSize));
  }

  // One lane: starts the copy of the tile's tokens at K block `step` of its part to stage `at`.
  __device__ void copy_tokens(const Params& p, const Tile& tile, int step, int at,
                              uint64_t policy) const {
    arrive_expecting(&x_full[at], kXBytes);
    tensor_copy(x + at * kXBytes, &p.x.map, {0, tile.first_token, tile.first_step + step},
                &x_full[at], policy);
  }
};

}  // namespace photon::cuda::batch
