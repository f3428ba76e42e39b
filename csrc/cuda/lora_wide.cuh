// Adapters inside the wide linears (stream_wide.cuh): no launch of their own. Tokens of one slot
// are dealt into tiles of 8. When x is there, some CTAs multiply 16 rows of A with a tile over some
// chunks of columns: a task. They leave the sums in global memory, and count. Behind the main loop,
// while the second group adds up the linear's sums, the first one waits for that count, which has
// long been complete, makes h of the sums, and multiplies it by its rows of B.
//
// Tasks begin with the last CTA: the first ones may have a half tile of rows more.
#pragma once
#include <algorithm>

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
constexpr int kSumsAtOnce = 2;   // of a token, on their way

// The tokens that have an adapter, by slot. A warp deals out 32 tokens.
template <int kTokens>
class Tiles {
 public:
  int32_t slot_of_token[kTokens];
  int32_t active;   // tokens that live
  unsigned before;  // CTAs that had seen all tasks done when this one did

  // By all threads, of which one has each token; a barrier is to follow.
  __device__ void find(int32_t slot, int live) {
    const int token = threadIdx.x, lane = token % kWarpSize, warp = token / kWarpSize;
    if (token == 0) active = live;
    if (warp >= kWarps) return;
    if (token >= live) slot = 0;
    unsigned same = 0;  // lanes of the slot
#pragma unroll
    for (int other = 0; other < kWarpSize; ++other)
      same |= (__shfl_sync(kFullWarp, slot, other) == slot ? 1u : 0u) << other;
    const int place = __popc(same & below(lane));
    const unsigned leaders = __ballot_sync(kFullWarp, slot > 0 && place % kTileTokens == 0);
    unsigned own = leaders & same;
    for (int tiles = place / kTileTokens; tiles > 0; --tiles) own &= own - 1;
    if (token < kTokens) {
      slot_of_token[token] = slot;
      *reinterpret_cast<uint2*>(tokens_[token]) = make_uint2(~0u, ~0u);
    }
    if (lane == 0) of_warp_[warp] = __popc(leaders);
    __syncwarp();
    if (slot == 0) return;
    const int tile = warp * kWarpSize + __popc(leaders & below(__ffs(static_cast<int>(own)) - 1));
    tokens_[tile][place % kTileTokens] = static_cast<int8_t>(token);
    slot_[tile] = slot;  // by all of the tile
  }

  __device__ int count() const { return of_warp_[0] + (kWarps > 1 ? of_warp_[kWarps - 1] : 0); }
  __device__ int32_t slot(int tile) const { return slot_[at(tile)]; }
  // Token `i` of a tile; -1: none.
  __device__ int token(int tile, int i) const { return tokens_[at(tile)][i]; }

 private:
  static constexpr int kWarps = (kTokens + kWarpSize - 1) / kWarpSize;
  static_assert(kWarps <= 2);

  __device__ static unsigned below(int lane) { return (1u << lane) - 1; }
  __device__ int at(int tile) const {
    return kWarps > 1 && tile >= of_warp_[0] ? kWarpSize + tile - of_warp_[0] : tile;
  }

  int32_t of_warp_[2], slot_[kTokens];
  alignas(8) int8_t tokens_[kTokens][kTileTokens];
};

template <typename Size, Epilogue kEpilogue>
class Adapters {
 public:
  static constexpr bool kAny = true;
  static constexpr int kAtOnce = 4;  // tiles of a warp whose rows of B are on their way

  __device__ Adapters(const stream_linear::Params& p, const Params& own) : p_(p), own_(own) {}

  // First of all, by all threads: each asks for the slot of a token.
  __device__ void load() {
    slot_ = static_cast<int>(threadIdx.x) < p_.tokens ? slot_of(own_.slots, threadIdx.x) : 0;
  }

  // Before the wait, by all threads; a barrier is to follow. `at`: of kBytes of shared memory, in
  // bytes from its start.
  __device__ stream_linear::Added<true> begin(int at, int active) {
    at_ = at;
    tiles().find(slot_, active);
    return {products(), tiles().slot_of_token, Size::kTokens};
  }

  // Behind that barrier and before the wait: asks L2 for what of A and B the CTA will read.
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
    const int count = tiles().count(), first = rows.first_half_tile * kHalfTileRows,
              end = min(rows.end_half_tile * kHalfTileRows, p_.n),
              step = max(kElements / own_.b_stride, 1), lines = (end - first + step - 1) / step,
              kinds = stream_linear::is_swiglu<kEpilogue>(p_) ? 2 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * lines * kinds; i += wide::kThreads) {
      const int kind = i % kinds, line = i / kinds % lines, tile = i / kinds / lines;
      prefetch_to_l2(row_of_b(tile, kind * p_.n + first + line * step));
    }
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

  // By a group, before the last chunk of the first pass: the first group brings what A has made of
  // the tokens, before the scale. That takes two ways to L2 and back, while weights are on theirs.
  // The other group passes as many of its own barriers, as in Multiplier::run().
  __device__ void look(const wide::Group& group) const {
    if (!adds()) return;
    if (group.index == 0) return gather(group);
    group.sync();
    group.sync();
  }

  // Rows of B for some tiles.
  struct Rows {
    uint2 low[kAtOnce], high[kAtOnce];
  };

  // By the first group, when it has left the linear's sums: asks for the first rows.
  template <typename Output>
  __device__ void ask(const wide::Group& group, int row_tiles, const Output& output,
                      Rows& rows) const {
    if (group.index == 0 && adds()) load(rows, group.warp, row_tiles * tiles().count(), output);
  }

  // By both groups, when all have left the linear's sums: the first one computes what adapters add
  // to the pass's tiles.
  template <typename Output>
  __device__ void expand(const wide::Group& group, int row_tiles, const Output& output,
                         Rows& rows) const {
    if (!adds()) return;
    if (output.first_tile == 0) {
      if (group.index == 0) scale(output);
      group.sync();
    }
    if (group.index == 0) multiply(group, row_tiles * tiles().count(), output, rows);
  }

  // The last CTA that has seen the count makes it 0.
  __device__ void end() const {
    if (threadIdx.x == 0 && adds() && tiles().before == waiting() - 1) own_.counts[0] = 0;
  }

 private:
  static constexpr int kProductBytes = Size::kMTiles * kWarpgroupRows * Size::kTokens * 2;
  static constexpr int kPartialBytes = kSlices * kTileSums * 4;
  static constexpr int kShrunkBytes = Size::kTokens * kMostParts * kRank * 2;
  static constexpr int kScratchBytes =
      std::max(std::max(kProductBytes, kPartialBytes), 2 * kShrunkBytes);
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kResidual;

 public:
  static constexpr int kBytes =
      kScratchBytes + kShrunkBytes + static_cast<int>(sizeof(Tiles<Size::kTokens>));

 private:
  struct Task {
    int tile, part, group;
  };

  // Of shared memory: sums of the warps, then sums of tokens, then what is added to outputs [tile]
  // [tokens][16 rows]; what A has made of tokens [tokens][parts][kRank]; tiles of tokens.
  __device__ float* partial() const { return reinterpret_cast<float*>(dynamic_shared() + at_); }
  __device__ Bf16* products() const { return reinterpret_cast<Bf16*>(dynamic_shared() + at_); }
  __device__ Bf16* shrunk() const { return products() + kScratchBytes / 2; }
  __device__ Tiles<Size::kTokens>& tiles() const {
    return *reinterpret_cast<Tiles<Size::kTokens>*>(dynamic_shared() + at_ + kScratchBytes +
                                                    kShrunkBytes);
  }

  __device__ bool adds() const { return tiles().count() > 0 && share().part == 0; }

  // Computed anew where it is needed: registers are few.
  __device__ CtaTiles share() const { return stream_linear::cta_tiles<kEpilogue>(p_); }
  __device__ int columns() const { return own_.parts.count * kRank; }
  __device__ int all_tasks() const {
    return tiles().count() * own_.parts.count * own_.chunks.groups;
  }
  __device__ int first_task() const { return own_.ctas - 1 - static_cast<int>(blockIdx.x); }
  __device__ unsigned waiting() const { return static_cast<unsigned>(own_.ctas / p_.split); }

  __device__ Task task(int i) const {
    const int of_tile = own_.parts.count * own_.chunks.groups, rest = i % of_tile;
    return {i / of_tile, rest / own_.chunks.groups, rest % own_.chunks.groups};
  }

  __device__ const Bf16* rows_of_a(const Task& one) const {
    return own_.a + (tiles().slot(one.tile) - 1) * own_.a_slot_stride +
           static_cast<int64_t>(one.part) * own_.rank * own_.a_stride;
  }

  // Row `row` of the linear, in the matrix B of a tile's slot.
  __device__ const Bf16* row_of_b(int tile, int row) const {
    return own_.b + (tiles().slot(tile) - 1) * own_.b_slot_stride +
           static_cast<int64_t>(row) * own_.b_stride;
  }

  // Leaves the task's sums in global memory. All threads together.
  __device__ void run(const Task& one, const Bf16* gains) const {
    const Lane lane;
    const Bf16* const a = rows_of_a(one);
    const int token = tiles().token(one.tile, lane.g);
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
    const int owner = tiles().token(one.tile, token_of_sum(threadIdx.x));
    if (owner < 0) return;
    own_.sums[(one.group * kLoraTokens + owner) * columns() + one.part * kRank +
              row_of_sum(threadIdx.x)] = added_sums(partial(), threadIdx.x);
  }

  // By the first group: the sums of the tokens, of the parts that the CTA has rows of.
  __device__ void gather(const wide::Group& group) const {
    if (threadIdx.x == 0) {
      wait_in_grid(own_.counts, static_cast<unsigned>(all_tasks()));
      tiles().before = count_leaver(own_.counts + 1, waiting() - 1);
    }
    group.sync();
    for_quads([&](int at, int) {
      float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float* from = own_.sums + at;
#pragma unroll 1
      for (int i = 0; i < own_.chunks.groups; i += kSumsAtOnce) {
        uint4 found[kSumsAtOnce];
#pragma unroll
        for (int j = 0; j < kSumsAtOnce; ++j, from += kLoraTokens * columns())
          found[j] =
              load_fresh_if(i + j < own_.chunks.groups, reinterpret_cast<const uint4*>(from));
#pragma unroll
        for (int j = 0; j < kSumsAtOnce; ++j) {
          sums.x += __uint_as_float(found[j].x);
          sums.y += __uint_as_float(found[j].y);
          sums.z += __uint_as_float(found[j].z);
          sums.w += __uint_as_float(found[j].w);
        }
      }
      *reinterpret_cast<float4*>(partial() + at) = sums;
    });
    group.sync();
  }

  // By the first group: scales and rounds them.
  template <typename Output>
  __device__ void scale(const Output& output) const {
    for_quads([&](int at, int token) {
      const float4 sums = *reinterpret_cast<const float4*>(partial() + at);
      const float scale = output.scale(token);
      *reinterpret_cast<uint2*>(shrunk() + at) =
          make_uint2(pack_bf16(__fmul_rn(sums.x, scale), __fmul_rn(sums.y, scale)),
                     pack_bf16(__fmul_rn(sums.z, scale), __fmul_rn(sums.w, scale)));
    });
  }

  // body(where they are, token) for every four columns of h that the CTA needs.
  template <typename Body>
  __device__ void for_quads(const Body& body) const {
    constexpr int kQuads = kRank / 4;
    const CtaTiles rows = share();
    const int quads = own_.parts.count * kQuads, all = tiles().active * quads;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += kWarpgroupThreads) {
      const int token = i / quads;
      if (tiles().slot_of_token[token] > 0 && has_part(rows, i % quads / kQuads))
        body(i * 4, token);
    }
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

  // Tiles of rows by tiles of tokens, a pair a warp by turns; it has `rows` for the first ones.
  template <typename Output>
  __device__ void multiply(const wide::Group& group, int pairs, const Output& output,
                           Rows& rows) const {
    const int count = tiles().count(), step = kAtOnce * wide::kGroupWarps;
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
    const int g = Lane().g, count = tiles().count();
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
    const int low_row = row_of(output, tile, 0, 0), high_row = row_of(output, tile, 1, 0);
    const auto input = [&](int row) {
      const int token = tiles().token(token_tile, lane.g);
      return load_ranks(row >= 0 && token >= 0
                            ? shrunk() + token * columns() + own_.parts.of(row) * kRank
                            : nullptr,
                        own_.rank);
    };
    float sums[kSums];
    expand_tile(sums, low, high, input(low_row), input(high_row));
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = tiles().token(token_tile, lane.t * 2 + i % 2);
      if (token < 0) continue;
      products()[(tile * Size::kTokens + token) * kTileRows + lane.g + i / 2 * 8] =
          from_float<Bf16>(sums[i]);
    }
  }

  const stream_linear::Params& p_;
  const Params& own_;
  int at_ = 0;
  int32_t slot_ = 0;
};

}  // namespace photon::cuda::adapters
