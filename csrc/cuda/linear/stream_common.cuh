// What the kernels of the Hopper linears have in common (narrow_linear.cuh for up to 8 tokens, or
// 16 of weights of fewer bits; mid_linear.cuh, and mid_stored.cuh of fewer bits, for up to 64):
// which part of the work a CTA does, the ring that brings its weights, and how sums become outputs.
// More tokens have a kernel of their own, large_linear.cuh, with the same order of sums.
//
// A CTA owns consecutive rows of the weight, in tiles of 16. It goes through the columns in K
// chunks of 512. A K chunk has eight K blocks of 64 columns; each K block has a sum of its own,
// which goes on from K chunk to K chunk, and at the end the eight sums are added in order. Split-K:
// where a residual is added, and pairs of CTAs divide the rows about as well as single CTAs, two
// CTAs take the same rows and half of the columns each, and the second sends its sums to the first.
//
// A token has the same bits alone and in any batch, because all of that depends on the op, the
// weight's shape and the device, never on the number of tokens; because a token is a column of its
// own in every matrix instruction; and because the instruction of a warp adds its 16 products to a
// sum as the instruction of a warpgroup does, to the bit.
//
// The code that a layer runs should fit the SM's instruction caches: beyond 128 KiB each
// instruction comes from L2, which takes six times as long (benchmarks/FINDINGS.md). So ops
// that differ little share one kernel, which reads its params to tell them apart.
//
// More than 64 tokens that are normalized without a workspace, or of weights of fewer bits, go in
// groups, a launch or two each. A group writes its own tokens and reads none that another group
// writes. So it may start early behind the group before, like any kernel of a chain.
#pragma once
#include "common/linear.h"
#include "cuda/bf16.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear/ring_stage.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_tile_map.cuh"
#include "cuda/stamps.cuh"

namespace photon::cuda::stream_linear {

// Of a kernel's epilogues there are two. Epilogue::kStore: x is normalized, and outputs are
// written, or SwiGLU of them: Params::is_swiglu. Epilogue::kAdd: to the residual.

struct Params {
  RowTileMap tokens_map;  // of x, for many tokens
  RowTileMap weight[2];   // by part of the columns: those of [n, k]; SwiGLU: of [2n, k], gate rows,
                          // then up rows
  Bf16* out;              // [tokens, n]; kAdd: read, added to and written
  const Bf16* x;          // [tokens, k]
  const Bf16* gain;  // [k]: x is normalized by its root mean square and multiplied by this; null: x
                     // is taken as it is
  const Bf16* bias;  // a value per row of the weight, or null
  const int32_t* counts;
  int out_stride, x_stride;
  int first_token;  // of the group, to which x and out point; counts begins with the first token
                    // of the op
  int tokens, n, k;
  float eps, per_column;  // per_column: 1 / k
  int split;   // split-K parts, 1 or 2: a CTA takes one, and a cluster has a CTA for each
  int k_each;  // columns of a part, in whole K chunks; the last part ends with k
  int row_tiles_each,
      row_tiles_extra;  // 8-row tiles of rows that every CTA has; and how many CTAs have one more
  int most_tiles, pass_tiles;  // tiles of a CTA at most; and what one pass over x serves: tiles, or
                               // M tiles for many tokens
  int m_tile_tiles;            // of an M tile (mid_linear.cuh)
  int stages, stage_bytes;     // of the ring; of a warpgroup's, for many tokens
  int x_stages;                // the same of x
  uint32_t zero;               // 0; see arrive()
  bool is_swiglu;              // outputs are SwiGLU of two
};

constexpr int kKBlocks = 8;
constexpr int kKChunk = kKBlocks * kKBlockColumns;
constexpr int kDepths = kKBlockColumns / 16;  // matrix instructions, of 16 columns, for a K block
constexpr int kHalves = 2;  // of a K block: what a lane holds of it, 16 bytes each
constexpr int kTileRows = 16;
constexpr int kTokenTile = 8;
constexpr int kMaxStages = 12;

template <Epilogue kEpilogue>
__host__ __device__ inline bool is_swiglu(const Params& p) {
  return kEpilogue == Epilogue::kStore && p.is_swiglu;
}

template <Epilogue kEpilogue>
__device__ inline Stamps stamps_of(const Params& p) {
  const StampedKernel kernel = kEpilogue == Epilogue::kAdd ? StampedKernel::kLinearResidual
                               : is_swiglu<kEpilogue>(p)   ? StampedKernel::kNormSwiglu
                                                           : StampedKernel::kNormLinear;
  return Stamps(kernel, p.n, p.k);
}

constexpr int kTileRowTiles = 2;

// 8-row tiles of outputs in a tile. A SwiGLU tile has one: it is an 8-row tile of gate rows and the
// 8-row tile of up rows that goes with it.
template <Epilogue kEpilogue>
__host__ __device__ inline int tile_row_tiles(const Params& p) {
  return is_swiglu<kEpilogue>(p) ? 1 : kTileRowTiles;
}

// The part of the work that a CTA does: 8-row tiles [first_row_tile, end_row_tile) of the rows,
// columns [column, column + k).
struct CtaTiles {
  int part;  // the CTA's rank in its cluster: its split-K part
  int first_row_tile, end_row_tile, tiles, column, k;
};

// Whether two CTAs share rows (split-K), which only kAdd's kernels have to ask.
template <Epilogue kEpilogue>
__device__ inline bool is_split(const Params& p) {
  return kEpilogue == Epilogue::kAdd && p.split > 1;
}

// The rows that a CTA, or a cluster, has, which is number `rows` of those that divide them.
template <Epilogue kEpilogue>
__device__ inline CtaTiles tiles_of(const Params& p, int rows) {
  CtaTiles range;
  range.part = 0;
  range.first_row_tile = rows * p.row_tiles_each + min(rows, p.row_tiles_extra);
  range.end_row_tile = range.first_row_tile + p.row_tiles_each + (rows < p.row_tiles_extra ? 1 : 0);
  const int row_tiles = range.end_row_tile - range.first_row_tile;
  range.tiles =
      is_swiglu<kEpilogue>(p) ? row_tiles : (row_tiles + kTileRowTiles - 1) / kTileRowTiles;
  range.column = 0;
  range.k = p.k;
  return range;
}

template <Epilogue kEpilogue>
__device__ inline CtaTiles cta_tiles(const Params& p) {
  const int pairs = is_split<kEpilogue>(p) ? 1 : 0;  // as bits: a division takes longer
  CtaTiles range = tiles_of<kEpilogue>(p, static_cast<int>(blockIdx.x) >> pairs);
  range.part = static_cast<int>(blockIdx.x) & pairs;
  range.column = range.part * p.k_each;
  range.k = min(p.k_each, p.k - range.column);
  return range;
}

// How many tokens of the group live. The result is above `tokens` where the last live token comes
// after the group, and below 0 where it comes before.
__device__ inline int live_tokens(const Params& p) {
  return p.counts != nullptr ? max(load_fresh(p.counts), 0) - p.first_token : p.tokens;
}

// The two 8-row tiles of a tile, as rows of the weight; and whether the second is in the CTA's
// range.
struct TileRows {
  int first, second;
  bool is_whole;
};

template <Epilogue kEpilogue>
__device__ inline TileRows tile_rows(const Params& p, const CtaTiles& range, int tile) {
  const int row_tile = range.first_row_tile + tile * tile_row_tiles<kEpilogue>(p),
            row = row_tile * kRowTileRows;
  if (is_swiglu<kEpilogue>(p)) return {row, p.n + row, true};
  return {row, row + kRowTileRows, row_tile + 1 < range.end_row_tile};
}

// The output (a column of out) that row g of a tile's first or second 8-row tile computes, or -1
// where the tile reaches past the CTA's range or the weight.
template <Epilogue kEpilogue>
__device__ inline int output_of(const Params& p, const CtaTiles& range, int tile, int second,
                                int g) {
  const int row_tile = range.first_row_tile + tile * tile_row_tiles<kEpilogue>(p) +
                       (is_swiglu<kEpilogue>(p) ? 0 : second);
  const int output = row_tile * kRowTileRows + g;
  return row_tile < range.end_row_tile && output < p.n ? output : -1;
}

// The part of a CTA's work that one pass over x serves: tiles, or M tiles.
struct Pass {
  int first, count;
};

__device__ inline Pass pass_from(int first, int each, int all) {
  return {first, min(each, all - first)};
}

// Tells the compiler that a value is the same in all lanes: what is computed from it is then
// computed and kept once for the warp.
__device__ inline int of_warp(int value) { return __shfl_sync(kFullWarp, value, 0); }

// Where a lane reads and writes x in a K block of an 8-row tile. With group = lane / 4 and thread =
// lane % 4 it has one row, and of that the columns 32 half + 8 thread .. + 7.
struct LaneVectors {
  int group, thread;

  __device__ LaneVectors() : group(threadIdx.x % kWarpSize / 4), thread(threadIdx.x % 4) {}

  // Neighbouring groups read their vectors in one cycle: their rows differ in bit 2, which in
  // shared memory puts them into different halves of the banks (see row_tile_map.cuh).
  __device__ int row() const { return group >> 1 | (group & 1) << 2; }
  __device__ int column(int half) const { return half * 32 + thread * 8; }
  __device__ int offset(int half) const {
    return row() * kKBlockColumns * 2 + ((half * 4 + thread) ^ row()) * 16;
  }
};

// Multiplies eight values of a token, which are for two matrix instructions, by their gains. Adds
// the products of tokens with tokens to `squares`: the diagonal of that matrix is the sums of
// squares, of which the lane with group / 2 == thread has its group's in squares[group % 2].
__device__ inline void normalize(uint4& x, uint4 gain, float (&squares)[2]) {
  float products[4] = {squares[0], squares[1], 0.0f, 0.0f};
  multiply_bf16(products, {x.x, 0, x.y, 0}, {x.x, x.y});
  multiply_bf16(products, {x.z, 0, x.w, 0}, {x.z, x.w});
  squares[0] = products[0];
  squares[1] = products[1];
  x = make_uint4(times_bf16(x.x, gain.x), times_bf16(x.y, gain.y), times_bf16(x.z, gain.z),
                 times_bf16(x.w, gain.w));
}

// --- the ring ------------------------------------------------------------------------------------

struct Ring {
  unsigned char* at;
  Barrier* full;   // by stage: what was copied there has landed
  Barrier* empty;  // by stage: all warps have read it; null where a barrier of threads says so
  int stages, stage_bytes;

  __device__ unsigned char* stage(int index) const { return at + index * stage_bytes; }
};

// --- outputs -------------------------------------------------------------------------------------

// From sums to outputs.
template <Epilogue kEpilogue>
struct Output {
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;

  const Params& p;
  const CtaTiles& range;
  const float* squares;  // [K block][tokens]: of the K blocks' columns
  const Bf16* old;       // kAdd: of the pass [tile][tokens][16 rows], what out holds
  float* peer;           // [tile][tokens][8 rows][2]: what the second part sends to the first
  Barrier* arrived;      // that is there
  int tokens;            // of the arrays
  int first_tile;        // of the pass

  // One over the root mean square of a token, where it is normalized.
  __device__ float scale(int token) const {
    if (!kNormalizes) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int k_block = 0; k_block < kKBlocks; ++k_block) sum += squares[k_block * tokens + token];
    return rsqrtf(fmaf(sum, p.per_column, p.eps));
  }

  // Takes the sums of rows g and g + 8 of a tile of the pass. Without split-K they are complete.
  // With it, the CTA of the second part sends its sums to the CTA of the first part, which adds
  // them to its own. The sums of all passes are one phase of the barrier, so that the first part
  // waits in its first pass until the second part has done its last one. The second part waits for
  // nobody.
  __device__ void take(int tile, int g, int token, float scale, float low, float high) const {
    if (is_split<kEpilogue>(p)) {
      float* place = peer + (((first_tile + tile) * tokens + token) * kRowTileRows + g) * 2;
      if (range.part > 0) return send_to_block(place, 0, low, high, arrived);
      wait_barrier(arrived, 0);
      low += place[0];
      high += place[1];
    }
    finish(tile, g, token, scale, low, high);
  }

  // From complete sums.
  __device__ void finish(int tile, int g, int token, float scale, float low, float high) const {
    if constexpr (kNormalizes) {  // rounded before a bias is added: else the compiler contracts the
                                  // two in one kernel and not in the next
      low = __fmul_rn(low, scale);
      high = __fmul_rn(high, scale);
    }
    emit(tile, g, token, low, high);
  }

  // Announces what the second part will send: two values for each two rows of a tile and token.
  __device__ void expect_peer(int active) const {
    if (is_split<kEpilogue>(p) && range.part == 0) {
      arrive_expecting(arrived,
                       range.tiles * kTileRows * max(active, 0) * static_cast<int>(sizeof(float)));
    }
  }

  // Requests what out holds of the pass's tiles, which the first part alone reads; wait_copies()
  // and a barrier of the `threads` that have called this are to follow.
  __device__ void fetch_old(Bf16* place, int tiles, int active, int threads) const {
    if (is_split<kEpilogue>(p) && range.part > 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * tokens * 2; i += threads) {
      const int half = i % 2, token = i / 2 % tokens, tile = i / 2 / tokens;
      const int output = output_of<kEpilogue>(p, range, first_tile + tile, half, 0);
      if (output < 0 || token >= active) continue;
      async_copy16(place + i * kRowTileRows,
                   p.out + static_cast<int64_t>(token) * p.out_stride + output, true);
    }
    commit_copies();
  }

 private:
  __device__ float bias(int row) const { return p.bias != nullptr ? to_float(p.bias[row]) : 0.0f; }

  __device__ void emit(int tile, int g, int token, float low, float high) const {
    Bf16* out = p.out + static_cast<int64_t>(token) * p.out_stride;
    const int first = output_of<kEpilogue>(p, range, first_tile + tile, 0, g);
    if (is_swiglu<kEpilogue>(p)) {
      if (first >= 0)
        out[first] = silu_times<Bf16>(rounded<Bf16>(low + bias(first)),
                                      rounded<Bf16>(high + bias(p.n + first)));
    } else {
      const int second = output_of<kEpilogue>(p, range, first_tile + tile, 1, g);
      const Bf16* before = old + (tile * tokens + token) * kTileRows + g;
      if (first >= 0) out[first] = finished(low + bias(first), before);
      if (second >= 0) out[second] = finished(high + bias(second), before + kRowTileRows);
    }
  }

  __device__ static Bf16 finished(float v, const Bf16* before) {
    if constexpr (kEpilogue == Epilogue::kAdd) v = to_float(*before) + rounded<Bf16>(v);
    return from_float<Bf16>(v);
  }
};

}  // namespace photon::cuda::stream_linear
