// Keys and values on their way into shared memory, in split attention: a ring of slots, the keys of a step of positions in one, its values
// in the next. It runs ahead over all of a block's runs, whatever else the block does, and before wait_for_earlier() it fills: all it reads
// are old positions.
//
// Four warps are a crew. Each crew has a split, the ones of a block neighbouring splits of a run, and takes the same steps through it. A
// step has a tile of 16 positions for each warp, which requests, awaits and patches its own tiles alone. Rows of a tile hold their vectors
// of 16 bytes in an order of their own, so that the eight rows of a matrix that ldmatrix reads lie in different banks.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/split_work.cuh"

namespace photon::cuda {

constexpr int kTileTokens = 16;
constexpr int kRingBytes = 96 * 1024;

// How a block divides a head.
template <int kHeadDim>
struct SplitShape {
  static constexpr int kVectors = kHeadDim / kPack;  // of a row
  static constexpr int kPitch = kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
  static constexpr int kTileBytes = kTileTokens * kPitch * 16;
  static constexpr int kCrewWarps = 4, kCrewThreads = kCrewWarps * kWarpSize;
  static constexpr int kCrews = 3 * 2 * kCrewWarps * kTileBytes <= kRingBytes ? 2 : 1;  // splits at once, where three slots hold them
  static constexpr int kWarps = kCrews * kCrewWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kStepTokens = kCrewWarps * kTileTokens;  // of a split
  static constexpr int kSlotBytes = kWarps * kTileBytes;
  static constexpr int kSlots = kRingBytes / kSlotBytes;
  static constexpr int kWarpDims = (kHeadDim / kCrewWarps + 15) / 16 * 16;  // of values; a crew's last warp may have none

  static_assert(kSplitUnit % kStepTokens == 0 && kSlots >= 3 && kHeadDim % kWarpDims == 0);

  __device__ static int warp() { return threadIdx.x / kWarpSize; }
  __device__ static int crew() { return threadIdx.x / kCrewThreads; }
  __device__ static int crew_warp() { return warp() % kCrewWarps; }

  // Where a vector of a tile is. Because rows are powers of two apart, an exclusive or with 16 i leads i vectors on from a multiple of 2 i.
  __device__ static int place(int token, int vector) { return (token * kPitch + (vector ^ token % 8)) * 16; }
};

// Waits for all of the crew.
template <int kHeadDim>
__device__ inline void sync_crew() {
  constexpr int kFirstCrew = 1;  // number of its barrier
  sync_threads(kFirstCrew + SplitShape<kHeadDim>::crew(), SplitShape<kHeadDim>::kCrewThreads);
}

template <int kHeadDim>
struct RingMemory {
  using Shape = SplitShape<kHeadDim>;

  alignas(1024) unsigned char slots[Shape::kSlots][Shape::kWarps][Shape::kTileBytes];
  uint32_t present[Shape::kSlots][Shape::kWarps];  // of keys: the bits of the positions that were in the cache

  // Of each warp the runs from the one that it works on to the one whose steps it will request next, and then one without splits. They are
  // here and not in registers because they are rarely looked at.
  static constexpr int kRuns = Shape::kSlots / 2 + 2;
  RunCursor runs[kRuns][Shape::kWarps];

  __device__ const RunCursor& run(int number) const { return runs[number % kRuns][Shape::warp()]; }
};

// What requests the tiles of one warp.
template <int kHeadDim>
class KvRing {
 public:
  using Shape = SplitShape<kHeadDim>;
  using Memory = RingMemory<kHeadDim>;

  // From the block's first run on, which is number 0.
  __device__ KvRing(const SplitGrid& grid, const RunCursor& run, Memory& memory) : memory_(memory) {
    open_run(grid, run);
    if (has_more_) request_page(grid, run);
  }

  // Requests the next keys, or the values that go with them, into the next slot, which no lane reads any more. Every call is a group of
  // copies.
  __device__ void request(const SplitGrid& grid, const Share& share) {
    if (keys_) find_places(grid, share);
    if (is_open_) copy(memory_.slots[slot_][Shape::warp()], keys_ ? grid.cache.k : grid.cache.v, keys_ ? places_.k : places_.v);
    commit_copies();
    keys_ = !keys_;
    slot_ = slot_ + 1 == Shape::kSlots ? 0 : slot_ + 1;
  }

  // Whether all of the block's keys and values have been requested.
  __device__ bool is_done() const { return !has_more_ && keys_; }

  // Waits for the warp's tile of the oldest request but those that have been used.
  __device__ static void await() {
    wait_copies<Shape::kSlots - 1>();
    __syncwarp();
  }

 private:
  __device__ void open_run(const SplitGrid& grid, const RunCursor& run) {
    if (threadIdx.x % kWarpSize == 0) memory_.runs[opened_ % Memory::kRuns][Shape::warp()] = run;
    __syncwarp();
    has_more_ = run.has_run(grid);
    steps_ = run.steps();
  }

  // This lane's position in the step that comes next.
  __device__ int32_t position() const {
    return steps_.position(Shape::crew()) + Shape::crew_warp() * kTileTokens + static_cast<int32_t>(threadIdx.x % kTileTokens);
  }

  // Its page is long under way when the places are asked for.
  __device__ void request_page(const SplitGrid& grid, const RunCursor& run) {
    const int32_t at = position();
    const bool wanted = at < run.end_position() && at != run.new_position();
    page_ = grid.cache.request(grid.cache.pages_of(run.line.row), run.line.row, at, wanted);
  }

  // Takes the step that comes next and goes on.
  __device__ void find_places(const SplitGrid& grid, const Share& share) {
    is_open_ = has_more_;
    if (!has_more_) return;
    RunCursor run = memory_.run(opened_);
    places_ = grid.cache.places(page_, static_cast<int32_t>(grid.tiles.divides(run.team)), position());
    const uint32_t present = __ballot_sync(kFullWarp, places_.k != kAbsent);
    if (threadIdx.x % kWarpSize == 0) memory_.present[slot_][Shape::warp()] = present % (1u << kTileTokens);
    steps_.advance(Shape::kStepTokens, Shape::kCrews);
    if (steps_.is_done()) {
      run.next(grid, share);
      ++opened_;
      open_run(grid, run);
    }
    if (has_more_) request_page(grid, run);
  }

  // Copies a tile whose row i is at lane i's place; zeros where there is none.
  __device__ static void copy(unsigned char* tile, const Bf16* base, uint32_t place) {
    constexpr int kRows = kWarpSize / Shape::kPitch;  // of all lanes at once
    const int lane = threadIdx.x % kWarpSize, row = lane / Shape::kPitch, vector = lane % Shape::kPitch;
    const int first = Shape::place(row, vector);
    const unsigned char* column = computed_now(reinterpret_cast<const unsigned char*>(base) + vector * 16);  // one addition a row
#pragma unroll
    for (int i = 0; i < kTileTokens; i += kRows) {
      const uint32_t there = __shfl_sync(kFullWarp, place, row + i);
      const unsigned char* source = column + static_cast<size_t>(there != kAbsent ? there : 0) * 16;
      if (vector < Shape::kVectors) async_copy16(tile + i * Shape::kPitch * 16 + (first ^ i % 8 * 16), source, there != kAbsent);
    }
  }

  Memory& memory_;
  int opened_ = 0;  // the run of the step that comes next
  bool has_more_;   // there is such a step
  RunSteps steps_;
  int32_t page_;     // of that step
  KvPlaces places_;  // of the step before, whose values may still be to be requested
  bool is_open_ = false, keys_ = true;
  int slot_ = 0;
};

}  // namespace photon::cuda
