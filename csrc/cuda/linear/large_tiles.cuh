// Which tiles a CTA of the linears for many tokens has (large_linear.cuh), and the stages of their
// columns, in the order in which they are multiplied.
#pragma once
#include "cuda/linear/stream_common.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear::large {

constexpr int kGroups = 2;
constexpr int kTokens = kGroups * kWarpgroupRows;  // of a tile
constexpr int kMultipliers = kGroups * kWarpgroupThreads;
constexpr int kThreads = kMultipliers + kWarpgroupThreads;
constexpr int kSumRegisters = 232, kFillRegisters = 40;  // of a thread of the groups that multiply,
                                                         // and of the one that fills
constexpr int kXBytes = kTokens * kKBlockColumns * 2;    // of a stage
constexpr int kRowBytes = kKBlockColumns * 2;
constexpr int kGroupXBytes = kXBytes / kGroups;
constexpr int kBarrierBytes = 2 * kMaxStages * static_cast<int>(sizeof(Barrier));

struct Params {
  RowTileMap x, weight;  // boxes of one K block: of a tile's tokens; of its rows, or of half of
                         // them (copies_halves())
  Bf16* out;             // [tokens, n]; kAdd: read, added to and written
  const Bf16* bias;      // a value per row of the weight, or null
  const float* scale;    // kStore: what the sums of a token are multiplied by
  const int32_t* counts;
  int64_t out_stride;
  int tokens, n, k;
  int split, k_each;    // split-K parts and their columns, as in stream_linear::Params
  int row_tiles;        // of the weight
  int stages;           // of the ring
  bool is_paired;       // clusters of two CTAs, which share rows
  bool is_swiglu;       // a tile has as many gate rows, and the up rows that go with them behind
  bool stores_pairs;    // two outputs of a token side by side are a word
  bool rereads_weight;  // L2 keeps it as usual; else it makes room first
};

// Whether the two halves of a tile's rows are copied each for itself: gate and up rows lie apart,
// and two CTAs share the work.
__host__ __device__ inline bool copies_halves(const Params& p) {
  return p.is_swiglu || p.is_paired;
}

// The columns of out that a tile has.
template <int kRows>
__host__ __device__ inline int outputs_of(const Params& p) {
  return p.is_swiglu ? kRows / 2 : kRows;
}

// Bytes of a stage, and of what a tile's first part of the columns leaves.
template <int kRows>
constexpr int kStageBytes = kXBytes + kRows * kRowBytes;
template <int kRows>
constexpr int kKeptBytes = kTokens * kRows * static_cast<int>(sizeof(float));

// The tiles of the whole device, in units of a cluster's tiles, and which of them a CTA has.
struct Deal {
  const Params& p;
  int ctas, rank, clusters, first, units;
  int token_units;

  __device__ Deal(const Params& p, int active)
      : p(p),
        ctas(p.is_paired ? 2 : 1),
        rank(p.is_paired ? static_cast<int>(cluster_rank()) : 0),
        clusters(static_cast<int>(gridDim.x) / ctas),
        first(static_cast<int>(blockIdx.x) / ctas) {
    const int token_tiles = (max(active, 0) + kTokens - 1) / kTokens;
    token_units = (token_tiles + ctas - 1) / ctas;
    units = token_units * p.row_tiles;
  }

  // Of a unit: the CTA's first token, which may lie outside, and its tile of rows.
  __device__ int token(int unit) const { return (unit % token_units * ctas + rank) * kTokens; }
  __device__ int row_tile(int unit) const { return unit / token_units; }
};

// The end of a part's columns.
__device__ inline int end_of_part(const Params& p, int part) {
  return min((part + 1) * p.k_each, p.k);
}

// The stages of all tiles of a CTA, in the order in which they are multiplied.
struct Walk {
  const Deal& deal;
  int unit, token = 0, row_tile = 0;
  int part = 0, k_block = 0, column = 0;

  __device__ explicit Walk(const Deal& deal) : deal(deal), unit(deal.first) { find_tile(); }

  __device__ bool is_done() const { return unit >= deal.units; }

  __device__ void advance() {
    const Params& p = deal.p;
    const int end = end_of_part(p, part);
    column += kKChunk;
    if (column < end) return;
    column = part * p.k_each + ++k_block * kKBlockColumns;
    if (k_block < kKBlocks && column < end) return;
    k_block = 0;
    if (++part == p.split) {
      part = 0;
      unit += deal.clusters;
      find_tile();
    }
    column = part * p.k_each;
  }

 private:
  __device__ void find_tile() {
    if (is_done()) return;
    token = deal.token(unit);
    row_tile = deal.row_tile(unit);
  }
};

}  // namespace photon::cuda::stream_linear::large
