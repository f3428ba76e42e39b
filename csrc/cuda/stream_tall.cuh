// The Hopper linears for many tokens.
//
// A tile is 128 tokens by some rows of the weight. Two warp groups multiply it, 64 tokens each: the
// tokens are the left operand of the matrix instruction, the rows the right one. A warp of a third
// group, which leaves most of its registers to the others, fills a ring in shared memory by tensor
// copies; a stage is 64 columns of the tile's tokens and rows. A CTA has an SM to itself and takes
// one tile after the other, those of the same rows one behind the other, so that weights come from
// memory once. The ring goes on filling while a tile is written out.
//
// A tile is summed slice by slice: of slice j the columns 64 j + 512 c, chunk after chunk, in one
// running sum; at the slice's end that is added to the total. These are the sums of the kernels for
// fewer tokens, in their order (stream_common.cuh). With split-K a CTA takes one part of the
// columns after the other, and keeps the first part's total in shared memory meanwhile.
//
// Where x is to be normalized, a small kernel in front (tall_norm.cuh) multiplies it by the gains
// and leaves the scale of each token.
//
// The CTAs of a cluster have tiles side by side and share what these have in common: each copies a
// part of it, into the shared memory of all. They share the tokens, with different rows of the
// weight, or the rows, with different tokens. A stage is filled again when the groups of all CTAs
// have read it.
#pragma once
#include "cuda/stream_common.cuh"
#include "cuda/tall_multiply.cuh"

namespace photon::cuda::stream_linear::tall {

constexpr int kGroups = 2;
constexpr int kTokens = kGroups * kWarpgroupRows;  // of a tile
constexpr int kMultipliers = kGroups * kWarpgroupThreads;
constexpr int kThreads = kMultipliers + kWarpgroupThreads;
constexpr int kSumRegisters = 232, kFillRegisters = 40;  // of a thread of the groups that multiply,
                                                         // and of the one that fills
constexpr int kXBytes = kTokens * kSliceColumns * 2;     // of a stage
constexpr int kRowBytes = kSliceColumns * 2;
constexpr int kGroupXBytes = kXBytes / kGroups;
constexpr int kBarrierBytes = 2 * kMaxStages * static_cast<int>(sizeof(Barrier));

struct Params {
  HalfTileMap x, weight;  // boxes of one slice: of all tokens of a tile, or of a CTA's part of
                          // them; of all rows, or of half of them (copies_halves())
  Bf16* out;              // [tokens, n]; kResidual: read, added to and written
  const Bf16* bias;       // a value per row of the weight, or null
  const float* scale;     // kOutput: what the sums of a token are multiplied by
  const int32_t* counts;
  int64_t out_stride;
  int tokens, n, k;
  int split, k_each;    // split-K parts and their columns, as in stream_linear::Params
  int row_tiles;        // of the weight
  int stages;           // of the ring
  int cluster;          // CTAs: 1, 2 or 4
  bool shares_rows;     // a cluster of two; else clusters share tokens
  bool is_swiglu;       // a tile has as many gate rows, and the up rows that go with them behind
  bool stores_pairs;    // two outputs of a token side by side are a word
  bool rereads_weight;  // L2 keeps it as usual; else it makes room first
};

// Whether the two halves of a tile's rows are copied each for itself: gate and up rows lie apart,
// and two CTAs share the work.
__host__ __device__ inline bool copies_halves(const Params& p) {
  return p.is_swiglu || p.shares_rows;
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
  int rank, clusters, first, units;
  int token_units;

  __device__ Deal(const Params& p, int active)
      : p(p),
        rank(p.cluster > 1 ? static_cast<int>(cluster_rank()) : 0),
        clusters(static_cast<int>(gridDim.x) / p.cluster),
        first(static_cast<int>(blockIdx.x) / p.cluster) {
    const int token_tiles = (max(active, 0) + kTokens - 1) / kTokens;
    token_units = p.shares_rows ? (token_tiles + 1) / 2 : token_tiles;
    units = token_units * (p.shares_rows ? p.row_tiles : (p.row_tiles + p.cluster - 1) / p.cluster);
  }

  // Of a unit: the CTA's first token and its tile of rows, either of which may lie outside.
  __device__ int token(int unit) const {
    const int at = unit % token_units;
    return (p.shares_rows ? at * 2 + rank : at) * kTokens;
  }
  __device__ int row_tile(int unit) const {
    const int at = unit / token_units;
    return p.shares_rows ? at : at * p.cluster + rank;
  }
};

// The end of a part's columns.
__device__ inline int end_of_part(const Params& p, int part) {
  return min((part + 1) * p.k_each, p.k);
}

// The stages of all tiles of a CTA, in the order in which they are multiplied.
struct Walk {
  const Deal& deal;
  int unit, token, row_tile;
  int part = 0, slice = 0, column = 0;

  __device__ explicit Walk(const Deal& deal) : deal(deal), unit(deal.first) { find_tile(); }

  __device__ bool is_done() const { return unit >= deal.units; }

  __device__ void advance() {
    const Params& p = deal.p;
    const int end = end_of_part(p, part);
    column += kChunk;
    if (column < end) return;
    column = part * p.k_each + ++slice * kSliceColumns;
    if (slice < kSlices && column < end) return;
    slice = 0;
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
                       bool to_all, uint64_t policy) const {
    const TensorPlace at{0, row, column / kSliceColumns};
    if (to_all) {
      tensor_copy_to(static_cast<uint16_t>((1 << deal.p.cluster) - 1), place(stage) + offset,
                     &map.map, at, &ring.full[stage], policy);
    } else {
      tensor_copy(place(stage) + offset, &map.map, at, &ring.full[stage], policy);
    }
  }

  __device__ void copy_tokens(int stage, const Walk& walk) const {
    const Params& p = deal.p;
    const bool to_all = p.cluster > 1 && !p.shares_rows;
    const int each = to_all ? kTokens / p.cluster : 0;
    copy(p.x, stage, deal.rank * each * kRowBytes, walk.token + deal.rank * each, walk.column,
         to_all, evict_last());
  }

  __device__ void copy_rows(int stage, const Walk& walk) const {
    const Params& p = deal.p;
    const int row = walk.row_tile * outputs_of<kRows>(p);
    const int second = p.is_swiglu ? p.n + row : row + kRows / 2;  // row of the second half
    if (p.shares_rows) {
      copy(p.weight, stage, kXBytes + deal.rank * kHalfBytes, deal.rank == 0 ? row : second,
           walk.column, true, weight_policy);
      return;
    }
    copy(p.weight, stage, kXBytes, row, walk.column, false, weight_policy);
    if (p.is_swiglu)
      copy(p.weight, stage, kXBytes + kHalfBytes, second, walk.column, false, weight_policy);
  }
};

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
    for (int before = 0; before < min(columns, kChunk); before += kSliceColumns) {
      float sum[kSums];
      add_slice(sum, (columns - before + kChunk - 1) / kChunk);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += sum[i];
    }
  }

 private:
  // While a stage is multiplied, the one before it is done and is given back.
  __device__ void add_slice(float (&sum)[kSums], int steps) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_barrier(&ring.full[at.index], at.parity);
      unsigned char* const stage = ring.at + at.index * kStageBytes<kRows>;
      const HalfTileFragment x(stage + group * kGroupXBytes), rows(stage + kXBytes);
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
    if (p.cluster == 1) {
      if (lane == 0) arrive(&ring.empty[stage]);
    } else if (lane < p.cluster) {
      arrive_in_block(&ring.empty[stage], lane, 0);
    }
  }
};

// From a lane's totals to outputs, as Output does it in stream_common.cuh. A lane has two tokens,
// eight apart, and of each eight rows two side by side.
template <int kRows, Epilogue kEpilogue>
struct Finish {
  static constexpr int kEights = kRows / kHalfTileRows;

  const Params& p;
  int active;

  __device__ void run(const float (&total)[kRows / 2], int tile_token, int row_tile) const {
    const int lane = threadIdx.x % kWarpSize,
              token = tile_token + static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane / 4;
    const int column = row_tile * outputs_of<kRows>(p) + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = token + half * 8;
      if (own >= active) continue;
      Bf16* const out = p.out + own * p.out_stride;
      if constexpr (kEpilogue == Epilogue::kResidual) {
        add(total, half, out, column);
      } else if (p.is_swiglu) {
        gate(total, half, p.scale[own], out, column);
      } else {
        write(total, half, p.scale[own], out, column);
      }
    }
  }

 private:
  __device__ float bias(int row) const { return p.bias != nullptr ? to_float(p.bias[row]) : 0.0f; }

  __device__ void store(Bf16* out, int column, Bf16 first, Bf16 second) const {
    if (p.stores_pairs && column + 1 < p.n) {
      *reinterpret_cast<__nv_bfloat162*>(out + column) = __nv_bfloat162{first, second};
      return;
    }
    if (column < p.n) out[column] = first;
    if (column + 1 < p.n) out[column + 1] = second;
  }

  __device__ void write(const float (&total)[kRows / 2], int half, float scale, Bf16* out,
                        int column) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n, column += kHalfTileRows) {
      if (column >= p.n) return;
      const auto value = [&](int i, int at) {
        return from_float<Bf16>(__fmul_rn(total[4 * n + 2 * half + i], scale) + bias(at));
      };
      store(out, column, value(0, column), value(1, min(column + 1, p.n - 1)));
    }
  }

  __device__ void gate(const float (&total)[kRows / 2], int half, float scale, Bf16* out,
                       int column) const {
#pragma unroll
    for (int n = 0; n < kEights / 2; ++n, column += kHalfTileRows) {
      if (column >= p.n) return;
      const auto value = [&](int i, int at) {
        const float low = __fmul_rn(total[4 * n + 2 * half + i], scale),
                    high = __fmul_rn(total[4 * (n + kEights / 2) + 2 * half + i], scale);
        return silu_times<Bf16>(rounded<Bf16>(low + bias(at)),
                                rounded<Bf16>(high + bias(p.n + at)));
      };
      store(out, column, value(0, column), value(1, min(column + 1, p.n - 1)));
    }
  }

  // Columns come in whole eights, and their rows are aligned. What out holds is requested for some
  // eights at once.
  __device__ void add(const float (&total)[kRows / 2], int half, Bf16* out, int column) const {
    constexpr int kAtOnce = kEights < 6 ? kEights : 6;
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
      int32_t old[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = column + (first + i) * kHalfTileRows;
        old[i] = first + i < kEights && at < p.n
                     ? load_fresh(reinterpret_cast<const int32_t*>(out + at))
                     : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i, at = column + n * kHalfTileRows;
        if (n >= kEights || at >= p.n) continue;
        const float low = rounded<Bf16>(total[4 * n + 2 * half] + bias(at)),
                    high = rounded<Bf16>(total[4 * n + 2 * half + 1] + bias(at + 1));
        __nv_bfloat162 before;
        memcpy(&before, &old[i], sizeof(before));
        *reinterpret_cast<uint32_t*>(out + at) =
            pack_bf16(to_float(before.x) + low, to_float(before.y) + high);
      }
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
    if constexpr (kEpilogue == Epilogue::kResidual) {
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
    init_barrier(&ring.full[i], 1);
    init_barrier(&ring.empty[i], kMultipliers / kWarpSize * p.cluster);
  }
  if (i == kMultipliers) {
    prefetch_half_tile_map(p.weight);
    prefetch_half_tile_map(p.x);
  }
  if (i < kWarpSize) fence_barriers();
  __syncthreads();
  if (p.cluster > 1) {
    enter_cluster();
    meet_cluster();  // the others' barriers are there
  }
  if (i < kMultipliers) {
    grow_registers<kSumRegisters>();
    multiply_tiles<kRows, kEpilogue>(deal, ring, kept, active);
  } else {
    Filler<kRows> filler(deal, ring);
    shrink_registers<kFillRegisters>();
    const bool fills = i < kMultipliers + kWarpSize && is_elected();
    if (fills) filler.begin();
    wait_for_earlier();
    if (fills) {
      fence_async_global();
      filler.run();
    }
    __syncwarp();
  }
  if (p.cluster > 1) {
    leave_cluster();
    meet_cluster();  // nobody reaches into a CTA that has ended
  }
}

}  // namespace photon::cuda::stream_linear::tall
