// Keys and values on their way into shared memory, in split attention: a ring of slots, the keys of
// a step of positions in one, its values in the next. It runs ahead through all of a CTA's tile
// ranges. It is filled before wait_for_earlier(), because it reads old positions only, which no
// kernel of the chain writes.
//
// Four warps are a warp group. A step has 64 positions of a split for each warp group, and so a
// tile of 16 positions for each warp (in fp8 128 and 32, as many bytes), which requests, awaits and
// patches its own tiles alone. Rows of a tile hold their vectors of 16 bytes in an order of their
// own, so that the eight rows of a matrix that ldmatrix reads lie in different banks.
#pragma once
#include "cuda/attention/split_load.cuh"
#include "cuda/attention/split_ranges.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// How a CTA divides a head of keys and values of this load stage (split_load.cuh).
template <typename Kv_, int kHeadDim_>
struct SplitShape {
  using Kv = Kv_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileTokens = Kv::kTileTokens,
                       kTileFragments = kTileTokens / 16;  // of 16 tokens
  static constexpr int kVectors = kHeadDim / Kv::kVector;  // of a row
  static constexpr int kPitch = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
  static constexpr int kTileBytes = kTileTokens * kPitch * 16;
  static constexpr int kWarpGroupWarps = 4, kWarpGroupThreads = kWarpGroupWarps * kWarpSize,
                       kWarpGroupTokens = kWarpGroupWarps * kTileTokens;
  static constexpr int kWarpGroups =
      kHeadDim <= 64 ? 2 : 1;  // of longer heads two need more registers than there are
  static constexpr int kWarps = kWarpGroups * kWarpGroupWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kStepTokens = kWarpGroups * kWarpGroupTokens,
                       kItemBits = (kTileTokens == 16 ? 6 : 7) + kWarpGroups -
                                   1;  // a work item of splits is a step
  static constexpr int kSlotBytes = kWarps * kTileBytes;
  // There is room for 96 KiB. What is requested before the kernel before has ended delays what that
  // one waits for: a step of the 0.6B, heads of 128, gains by two steps in the ring for three, and
  // one of the 1B, heads of 64, loses at 32 tokens (benchmarks/FINDINGS.md). Of heads of 256 three
  // slots are the least. In fp8 there is room for 64 KiB beside the scales.
  static constexpr int kRingBytes =
      (Kv::kIsScaled || (kHeadDim > 64 && kHeadDim <= 128) ? 64 : 96) * 1024;
  static constexpr int kSlots = kRingBytes / kSlotBytes;
  static constexpr int kWarpDims = (kHeadDim / kWarpGroupWarps + 15) / 16 *
                                   16;  // of values; a warp group's last warp may have none

  static_assert(kStepTokens == 1 << kItemBits && kSlots >= 3 && kHeadDim % kWarpDims == 0);

  __device__ static int warp() { return threadIdx.x / kWarpSize; }
  __device__ static int warp_group() { return threadIdx.x / kWarpGroupThreads; }
  __device__ static int warp_group_warp() { return warp() % kWarpGroupWarps; }
  __device__ static int following(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }

  // Where a vector of a tile is. Because rows are powers of two apart, an exclusive or with 16 i
  // leads from vector v to vector v + i, and from the order of row r to that of row r + i, where
  // they have no bit in common; i is less than 8 for rows. Of rows of four vectors two have the
  // same order.
  __device__ static int place(int token, int vector) {
    const int order = kPitch == 4 ? token / 2 % 4 : token % 8;
    return (token * kPitch + (vector ^ order)) * 16;
  }
};

// Waits for all of the warp group.
template <typename Shape>
__device__ inline void sync_warp_group() {
  constexpr int kFirstWarpGroup = 1;  // number of its barrier
  sync_threads(kFirstWarpGroup + Shape::warp_group(), Shape::kWarpGroupThreads);
}

// Of keys and values in fp8 the scales of both, which come with the keys.
template <typename Shape, bool = Shape::Kv::kIsScaled>
struct RingScales {};

template <typename Shape>
struct RingScales<Shape, true> {
  TileScales<Shape::kTileTokens> scales[Shape::kSlots][Shape::kWarps];
};

template <typename Shape>
struct RingMemory : RingScales<Shape> {
  alignas(1024) unsigned char slots[Shape::kSlots][Shape::kWarps][Shape::kTileBytes];
  uint32_t present[Shape::kSlots]
                  [Shape::kWarps];  // of keys: the bits of the positions that were in the cache

  // For each warp the tile ranges from the one that it works on to the one whose steps it will
  // request next, and then one without splits. They are here and not in registers because they are
  // rarely read.
  static constexpr int kRanges = Shape::kSlots / 2 + 2;
  RangeCursor ranges[kRanges][Shape::kWarps];

  __device__ const RangeCursor& range(int number) const {
    return ranges[number % kRanges][Shape::warp()];
  }
};

// What requests the tiles of one warp.
template <typename Shape, bool kMany>
class KvRing {
 public:
  using Memory = RingMemory<Shape>;
  using Grid = typename Shape::Kv::Grid;

  // How often both refills have to be called to fill the ring before anything is read.
  static constexpr int kFills = Shape::kSlots / 2;

  // Begins with the CTA's first tile range, which is number 0.
  __device__ KvRing(const Grid& grid, const CtaRanges<kMany>& ranges, const RangeCursor& range,
                    Memory& memory)
      : memory_(memory), ranges_(ranges) {
    open_range(grid, range);
    if (has_more_) request_page(grid);
    if constexpr (kIsOdd) request<true>(grid);
  }

  // Called when all of the warp group, or of keys the warp, have read the oldest slot, which had
  // keys or values, or before anything has been requested for it: requests what comes into it.
  template <bool kHadKeys>
  __device__ void refill(const Grid& grid) {
    request<kHadKeys != kIsOdd>(grid);
  }

  // Whether all of the CTA's keys and values have been requested, where the next slot to be read
  // has keys.
  __device__ bool is_done() const { return !has_more_ && !(kIsOdd && is_open_); }

  // Waits for the warp's tile of the oldest request but those that have been used.
  __device__ static void await() {
    wait_copies<Shape::kSlots - 1>();
    __syncwarp();
  }

 private:
  static constexpr bool kIsOdd = Shape::kSlots % 2 != 0;
  static constexpr uint32_t kAllTokens = ~0u >> (kWarpSize - Shape::kTileTokens);

  // Keys come first, then the values that go with them. Every call is a group of copies.
  template <bool kKeys>
  __device__ void request(const Grid& grid) {
    if constexpr (kKeys) find_places(grid);
    if (is_open_)
      copy(memory_.slots[slot_][Shape::warp()], kKeys ? grid.cache.k : grid.cache.v,
           kKeys ? places_.k : places_.v);
    commit_copies();
    slot_ = Shape::following(slot_);
  }

  __device__ void open_range(const Grid& grid, const RangeCursor& range) {
    if (threadIdx.x % kWarpSize == 0)
      memory_.ranges[opened_ % Memory::kRanges][Shape::warp()] = range;
    __syncwarp();
    has_more_ = range.has_range(grid);
    at_ = range.begin_position(grid);
    end_ = range.end_position(grid);
    new_position_ = range.new_position();
    kv_head_ = static_cast<int32_t>(grid.tiles.divides(range.split_group));
    row_ = range.token.row;
  }

  // This lane's position in the step that comes next.
  __device__ int32_t position() const {
    return at_ + Shape::warp() * Shape::kTileTokens +
           static_cast<int32_t>(threadIdx.x % Shape::kTileTokens);
  }

  // Requests its page, which has arrived by the time its places are computed.
  __device__ void request_page(const Grid& grid) {
    const int32_t at = position();
    page_ =
        grid.cache.request(grid.cache.pages_of(row_), row_, at, at < end_ && at != new_position_);
  }

  // Finds the places of the step that comes next, and goes on to the one after it.
  __device__ void find_places(const Grid& grid) {
    is_open_ = has_more_;
    if (!has_more_) return;
    places_ = grid.places(page_, kv_head_, position());
    const uint32_t present = __ballot_sync(kFullWarp, places_.k != kAbsent);
    if (threadIdx.x % kWarpSize == 0) memory_.present[slot_][Shape::warp()] = present & kAllTokens;
    if constexpr (Shape::Kv::kIsScaled) copy_scales(grid.scales);
    at_ += Shape::kStepTokens;
    if (at_ >= end_) open_next_range(grid);
    if (has_more_) request_page(grid);
  }

  __device__ void open_next_range(const Grid& grid) {
    RangeCursor range = memory_.range(opened_);
    ranges_.advance(range);
    ++opened_;
    open_range(grid, range);
  }

  // Every lane has a position.
  __device__ void copy_scales(const KvScales& scales) {
    static_assert(Shape::kTileTokens == kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    const bool is_there = places_.k != kAbsent;
    const float* key = scales.base + (is_there ? places_.scale : 0);
    auto& to = memory_.scales[slot_][Shape::warp()];
    async_copy<4>(&to.keys[lane], key, is_there);
    async_copy<4>(&to.values[lane], key + scales.values, is_there);
  }

  // Copies a tile whose row i is at lane i's place; zeros where there is none.
  __device__ static void copy(unsigned char* tile, const Bf16* base, uint32_t place) {
    constexpr int kRows = kWarpSize / Shape::kPitch;  // of all lanes at once
    const int lane = threadIdx.x % kWarpSize, row = lane / Shape::kPitch,
              vector = lane % Shape::kPitch;
    const int first = Shape::place(row, vector);
    const unsigned char* column = computed_now(reinterpret_cast<const unsigned char*>(base) +
                                               vector * 16);  // one addition a row
#pragma unroll
    for (int i = 0; i < Shape::kTileTokens; i += kRows) {
      const uint32_t there = __shfl_sync(kFullWarp, place, row + i);
      const unsigned char* source = column + static_cast<size_t>(there != kAbsent ? there : 0) * 16;
      if (vector < Shape::kVectors)
        async_copy16(tile + i * Shape::kPitch * 16 + (first ^ i % 8 * 16), source,
                     there != kAbsent);
    }
  }

  Memory& memory_;
  const CtaRanges<kMany>& ranges_;
  int opened_ = 0;                        // the tile range of the step that comes next
  bool has_more_;                         // there is such a step
  int32_t at_, end_;                      // positions: of that step, and where its run ends
  int32_t new_position_, kv_head_, row_;  // of that run
  int32_t page_;                          // of that step
  typename Grid::Places places_;  // of the step before, whose values may still be to be requested
  bool is_open_ = false;          // there was such a step
  int slot_ = 0;
};

}  // namespace photon::cuda
