// Adapters inside the wide linears (stream_wide.cuh): no launch of their own. Tokens of one slot are
// dealt into tiles of 8. When x is there, some CTAs multiply 16 rows of A with a tile over some
// chunks of columns: a task. They leave the sums in global memory, and count. Behind the main loop,
// while the second group adds up the linear's sums, the first one waits for that count, which has
// long been complete, makes h of the sums, and multiplies it by its rows of B.
//
// Tasks begin with the last CTA: the first ones may have a half tile of rows more.
#pragma once
#include "cuda/grid.cuh"
#include "cuda/lora_tile.cuh"
#include "cuda/stream_wide.cuh"

namespace photon::cuda::adapters {

using stream_linear::CtaTiles, stream_linear::Epilogue, stream_linear::kTileRows;
namespace wide = stream_linear::wide;

// A kernel parameter. `counts`: how many tasks are done, and how many CTAs have seen it.
struct Params {
  const Bf16 *a, *b;  // [slots, parts x rank, k], [slots, n, rank]
  TokenSlots slots;
  unsigned* counts;
  float* sums;  // [group][kLoraTokens][parts][kLoraRank]
  int64_t a_slot_stride, b_slot_stride;
  int a_stride, b_stride, rank;
  Parts parts;
  Chunks chunks;
  int ctas;  // that have rows
};

constexpr int kRank = static_cast<int>(kLoraRank), kMostParts = static_cast<int>(kLoraParts);
constexpr int kLineBytes = 128;  // of L2

// The tokens that have an adapter, by slot.
template <int kTokens>
struct Tiles {
  int32_t slot_of_token[kTokens], leader[kTokens];
  int32_t slot[kTokens];                // of a tile
  int8_t tokens[kTokens][kTileTokens];  // of a tile; -1: none
  int32_t count, active;                // tiles; tokens that live
  unsigned before;                      // CTAs that had seen all tasks done when this one did
  int32_t padding;

  // All threads must call it.
  __device__ void find(const TokenSlots& slots, int live) {
    const int own = threadIdx.x;
    if (own < kTokens) {
      slot_of_token[own] = own < live ? slot_of(slots, own) : 0;
      for (int i = 0; i < kTileTokens; ++i) tokens[own][i] = -1;
    }
    __syncthreads();
    int before = 0, first = own;  // tokens of the slot before this one; the first of its tile
    if (own < kTokens) {
#pragma unroll 4
      for (int other = 0; other < own; ++other) {
        if (slot_of_token[other] != slot_of_token[own]) continue;
        if (before % kTileTokens == 0) first = other;
        ++before;
      }
      if (before % kTileTokens == 0) first = own;
      leader[own] = slot_of_token[own] > 0 && first == own ? 1 : 0;
    }
    __syncthreads();
    int all = 0, tile = 0;
#pragma unroll 4
    for (int other = 0; other < kTokens; ++other) {
      if (other == first) tile = all;
      all += leader[other];
    }
    if (own < kTokens && slot_of_token[own] > 0) {
      tokens[tile][before % kTileTokens] = static_cast<int8_t>(own);
      slot[tile] = slot_of_token[own];  // by all of the tile
    }
    if (own == 0) {
      count = all;
      active = live;
    }
    __syncthreads();
  }
};

template <typename Size, Epilogue kEpilogue>
class Adapters {
 public:
  static constexpr bool kAny = true;

  __device__ Adapters(const stream_linear::Params& p, const Params& own) : p_(p), own_(own) {}

  // Before the wait, by all threads. `at`: of kBytes of shared memory, in bytes from its start.
  __device__ stream_linear::Added<true> begin(int at, int active) {
    at_ = at;
    tiles().find(own_.slots, active);
    prefetch();
    return {products(), tiles().slot_of_token, Size::kTokens};
  }

  // Behind the wait, by all threads: the CTA's tasks. `gains`: of all columns, in shared memory.
  __device__ void shrink(const unsigned char* gains) const {
    const int tasks = all_tasks();
    unsigned done = 0;
#pragma unroll 1
    for (int i = first_task(); i < tasks; i += own_.ctas, ++done) {
      if (done > 0) __syncthreads();  // the sums of the one before have been read
      run(task(i), reinterpret_cast<const Bf16*>(gains));
    }
    if (done == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) arrive_in_grid(own_.counts, done);
  }

  // By both groups, when the first one has left the linear's sums: what adapters add to the pass's
  // tiles, by the first group. The other one passes as many of its own barriers, as in
  // Multiplier::run().
  template <typename Output>
  __device__ void expand(const wide::Group& group, int row_tiles, const Output& output) const {
    if (tiles().count == 0 || share().part > 0) return;
    if (group.index == 0) {
      multiply(group, row_tiles, output);
    } else if (output.first_tile == 0) {
      group.sync();
      group.sync();
    }
  }

  // The last CTA that has seen the count makes it 0.
  __device__ void end() const {
    if (threadIdx.x == 0 && tiles().count > 0 && share().part == 0 &&
        tiles().before == waiting() - 1)
      own_.counts[0] = 0;
  }

 private:
  static constexpr int kProductBytes = Size::kMTiles * kWarpgroupRows * Size::kTokens * 2;
  static constexpr int kPartialBytes = kSlices * kTileSums * 4;
  static constexpr int kScratchBytes =
      kProductBytes > kPartialBytes ? kProductBytes : kPartialBytes;
  static constexpr int kShrunkBytes = Size::kTokens * kMostParts * kRank * 2;
  static constexpr int kAtOnce = 4;  // tiles of a warp whose rows of B are on their way
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kResidual;

 public:
  static constexpr int kBytes =
      kScratchBytes + kShrunkBytes + static_cast<int>(sizeof(Tiles<Size::kTokens>));

 private:
  struct Task {
    int tile, part, group;
  };

  // Rows of B for some tiles.
  struct Rows {
    uint2 low[kAtOnce], high[kAtOnce];
  };

  // Of shared memory: sums of the warps, then what is added to outputs [tile][tokens][16 rows]; what
  // A has made of tokens [tokens][parts][kRank]; tiles of tokens.
  __device__ float* partial() const { return reinterpret_cast<float*>(dynamic_shared() + at_); }
  __device__ Bf16* products() const { return reinterpret_cast<Bf16*>(dynamic_shared() + at_); }
  __device__ Bf16* shrunk() const { return products() + kScratchBytes / 2; }
  __device__ Tiles<Size::kTokens>& tiles() const {
    return *reinterpret_cast<Tiles<Size::kTokens>*>(dynamic_shared() + at_ + kScratchBytes +
                                                    kShrunkBytes);
  }

  // Computed anew where it is needed: registers are few.
  __device__ CtaTiles share() const { return stream_linear::cta_tiles<kEpilogue>(p_); }
  __device__ int columns() const { return own_.parts.count * kRank; }
  __device__ int all_tasks() const { return tiles().count * own_.parts.count * own_.chunks.groups; }
  __device__ int first_task() const { return own_.ctas - 1 - static_cast<int>(blockIdx.x); }
  __device__ unsigned waiting() const { return static_cast<unsigned>(own_.ctas / p_.split); }

  __device__ Task task(int i) const {
    const int of_tile = own_.parts.count * own_.chunks.groups, rest = i % of_tile;
    return {i / of_tile, rest / own_.chunks.groups, rest % own_.chunks.groups};
  }

  __device__ const Bf16* rows_of_a(const Task& one) const {
    return own_.a + (tiles().slot[one.tile] - 1) * own_.a_slot_stride +
           static_cast<int64_t>(one.part) * own_.rank * own_.a_stride;
  }

  // Row `row` of the linear, in the matrix B of a tile's slot.
  __device__ const Bf16* row_of_b(int tile, int row) const {
    return own_.b + (tiles().slot[tile] - 1) * own_.b_slot_stride +
           static_cast<int64_t>(row) * own_.b_stride;
  }

  // What of A and B the CTA will read.
  __device__ void prefetch() const {
    const int tasks = all_tasks();
    constexpr int kElements = kLineBytes / 2, kRowThreads = wide::kThreads / kRank;
    const int row = threadIdx.x / kRowThreads;
#pragma unroll 1
    for (int i = first_task(); i < tasks; i += own_.ctas) {
      const Task one = task(i);
      const int first = one.group * own_.chunks.each * kChunk,
                end = min(first + own_.chunks.each * kChunk, p_.k);
      const Bf16* const a = rows_of_a(one) + static_cast<int64_t>(row) * own_.a_stride;
      for (int column = first + threadIdx.x % kRowThreads * kElements;
           row < own_.rank && column < end; column += kRowThreads * kElements)
        prefetch_to_l2(a + column);
    }
    const CtaTiles rows = share();
    if (rows.part > 0) return;
    const int count = tiles().count, first = rows.first_half_tile * kHalfTileRows,
              end = min(rows.end_half_tile * kHalfTileRows, p_.n),
              step = max(kElements / own_.b_stride, 1),
              lines = (end - first + step - 1) / step,
              kinds = stream_linear::is_swiglu<kEpilogue>(p_) ? 2 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * lines * kinds; i += wide::kThreads) {
      const int kind = i % kinds, line = i / kinds % lines, tile = i / kinds / lines;
      prefetch_to_l2(row_of_b(tile, kind * p_.n + first + line * step));
    }
  }

  // Leaves the task's sums in global memory. All threads together.
  __device__ void run(const Task& one, const Bf16* gains) const {
    const Lane lane;
    const Bf16* const a = rows_of_a(one);
    const int token = tiles().tokens[one.tile][lane.g];
    const Sources from{
        lane.g < own_.rank ? a + static_cast<int64_t>(lane.g) * own_.a_stride : nullptr,
        lane.g + 8 < own_.rank ? a + static_cast<int64_t>(lane.g + 8) * own_.a_stride : nullptr,
        token >= 0 ? p_.x + static_cast<int64_t>(token) * p_.x_stride : nullptr, gains};
    float sums[kSums] = {}, squares[2] = {};
    add_slices<kNormalizes>(sums, squares, from, one.group * own_.chunks.each, own_.chunks.each,
                            p_.k);
    leave_sums(sums, partial());
    __syncthreads();
    if (threadIdx.x >= kTileSums) return;
    const int owner = tiles().tokens[one.tile][token_of_sum(threadIdx.x)];
    if (owner < 0) return;
    own_.sums[(one.group * kLoraTokens + owner) * columns() + one.part * kRank +
              row_of_sum(threadIdx.x)] = added_sums(partial(), threadIdx.x);
  }

  // By the first group: what A has made of the tokens, of the parts that the CTA has rows of.
  template <typename Output>
  __device__ void gather(const wide::Group& group, const Output& output) const {
    if (threadIdx.x == 0) {
      wait_in_grid(own_.counts, static_cast<unsigned>(all_tasks()));
      tiles().before = count_leaver(own_.counts + 1, waiting() - 1);
    }
    group.sync();
    constexpr int kQuads = kRank / 4;
    const CtaTiles rows = share();
    const int quads = own_.parts.count * kQuads;
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles().active * quads; i += kWarpgroupThreads) {
      const int token = i / quads, quad = i % quads;
      if (tiles().slot_of_token[token] == 0 || !has_part(rows, quad / kQuads)) continue;
      uint4 found[kLoraSums];
#pragma unroll
      for (int j = 0; j < kLoraSums; ++j) {
        found[j] = load_fresh_if(j < own_.chunks.groups,
                                 reinterpret_cast<const uint4*>(
                                     own_.sums + (j * kLoraTokens + token) * columns() + quad * 4));
      }
      float sums[4] = {};
      const float scale = output.scale(token);
#pragma unroll
      for (int j = 0; j < kLoraSums; ++j) {
        if (j >= own_.chunks.groups) break;
        sums[0] += __uint_as_float(found[j].x);
        sums[1] += __uint_as_float(found[j].y);
        sums[2] += __uint_as_float(found[j].z);
        sums[3] += __uint_as_float(found[j].w);
      }
      *reinterpret_cast<uint2*>(shrunk() + token * columns() + quad * 4) =
          make_uint2(pack_bf16(__fmul_rn(sums[0], scale), __fmul_rn(sums[1], scale)),
                     pack_bf16(__fmul_rn(sums[2], scale), __fmul_rn(sums[3], scale)));
    }
    group.sync();
  }

  __device__ bool has_part(const CtaTiles& rows, int part) const {
    if (stream_linear::is_swiglu<kEpilogue>(p_)) return true;
    return part >= own_.parts.of(rows.first_half_tile * kHalfTileRows) &&
           part <= own_.parts.of(rows.end_half_tile * kHalfTileRows - 1);
  }

  // The rows of the weight that a lane has of a tile of the pass; -1: none.
  template <typename Output>
  __device__ int row_of(const Output& output, int tile, int second, int g) const {
    const int found =
        stream_linear::output_of<kEpilogue>(p_, output.share, output.first_tile + tile, second, g);
    return found >= 0 && second > 0 && stream_linear::is_swiglu<kEpilogue>(p_) ? p_.n + found
                                                                               : found;
  }

  // Tiles of rows by tiles of tokens, a pair a warp by turns.
  template <typename Output>
  __device__ void multiply(const wide::Group& group, int row_tiles, const Output& output) const {
    const int count = tiles().count, pairs = row_tiles * count, step = kAtOnce * wide::kGroupWarps;
    Rows rows;
    load(rows, group.warp, pairs, output);
    if (output.first_tile == 0) gather(group, output);
#pragma unroll 1
    for (int first = group.warp; first < pairs; first += step) {
      if (first > group.warp) load(rows, first, pairs, output);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = first + i * wide::kGroupWarps;
        if (pair < pairs) multiply(rows.low[i], rows.high[i], pair / count, pair % count, output);
      }
    }
  }

  template <typename Output>
  __device__ void load(Rows& rows, int first, int pairs, const Output& output) const {
    const int g = Lane().g, count = tiles().count;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = first + i * wide::kGroupWarps, tile = pair % count;
      int low = -1, high = -1;
      if (pair < pairs) {
        low = row_of(output, pair / count, 0, g);
        high = row_of(output, pair / count, 1, g);
      }
      rows.low[i] = load_ranks(low >= 0 ? row_of_b(tile, low) : nullptr, own_.rank);
      rows.high[i] = load_ranks(high >= 0 ? row_of_b(tile, high) : nullptr, own_.rank);
    }
  }

  template <typename Output>
  __device__ void multiply(uint2 low, uint2 high, int tile, int token_tile,
                           const Output& output) const {
    const Lane lane;
    const int8_t* const tokens = tiles().tokens[token_tile];
    const int low_row = row_of(output, tile, 0, 0), high_row = row_of(output, tile, 1, 0);
    const auto input = [&](int row) {
      const int token = tokens[lane.g];
      return load_ranks(row >= 0 && token >= 0
                            ? shrunk() + token * columns() + own_.parts.of(row) * kRank
                            : nullptr,
                        own_.rank);
    };
    float sums[kSums];
    expand_tile(sums, low, high, input(low_row), input(high_row));
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = tokens[lane.t * 2 + i % 2];
      if (token < 0) continue;
      products()[(tile * Size::kTokens + token) * kTileRows + lane.g + i / 2 * 8] =
          from_float<Bf16>(sums[i]);
    }
  }

  const stream_linear::Params& p_;
  const Params& own_;
  int at_ = 0;
};

}  // namespace photon::cuda::adapters
