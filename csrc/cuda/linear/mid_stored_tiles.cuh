// What a CTA of the linears of stored weights for more tokens (mid_stored.cuh) holds: its parts of
// the work in their order, and where things lie in shared memory.
#pragma once
#include "cuda/linear/narrow_load.cuh"
#include "cuda/linear/stream_common.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear::mid_stored {

constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kUnitWarps = kGroupWarps / 2;  // that prepare a K block of a unit
constexpr int kMTileTiles = kWarpgroupRows / kTileRows;
constexpr int kBlockColumns = 128;  // of a K block
constexpr int kRowBytes = 128;      // of a row in a stage of the weights' ring
constexpr int kRowTileBytes = kRowTileRows * kRowBytes;
constexpr int kBlockX = kBlockColumns * 2;    // bytes of a token in a K block
constexpr int kVectors = kBlockColumns / 32;  // of x that a lane holds of a K block
constexpr int kDepths = kBlockColumns / 16;   // matrix instructions for a K block

// The scales of a weight, and its zero points, as they lie in memory. Counts are of scales.
struct Scales {
  const void* data;
  const uint8_t* zeros;  // or null
  int row_groups;        // from row to row
  int block_groups;      // of a K block; 0: a row has one
  int row_shift;         // 2^row_shift rows share theirs
  bool is_half;          // of int4: float16, else bfloat16
};

struct Params : stream_linear::Params {
  Scales scales;
};

// K blocks that a stage of the weights' ring holds.
template <typename Load>
constexpr int kStageBlocks = Load::kBlocks == kKBlocks ? 1 : 2;

// How many tokens and M tiles a pass has, and how many groups of warps share the K blocks of an M
// tile. Threads that multiply go on with more registers than they begin with, and those that feed
// them with what is left.
template <typename Load_, int kTokens_, int kMTiles_, int kShares_>
struct Size {
  using Load = Load_;
  static constexpr int kTokens = kTokens_, kMTiles = kMTiles_, kShares = kShares_;
  static constexpr int kTokenTiles = kTokens / kTokenTile;
  static constexpr int kGroups = kMTiles * kShares;  // that multiply
  static constexpr int kMultipliers = kGroups * kWarpgroupThreads;
  static constexpr int kThreads = kMultipliers + kWarpgroupThreads;
  static constexpr int kOwn = kShares == 1 ? 2 : 1;  // K blocks of a unit that a group multiplies
  static constexpr int kUnit = kShares * kOwn;       // K blocks side by side
  static constexpr int kUnitStages = kUnit / kStageBlocks<Load>;
  static constexpr int kXBytes = kTokens * kBlockX;  // of a stage
  static constexpr int kSums = kTokens / 2;          // of a lane, for a K block of an M tile
  static constexpr int kTotalBytes = kSums * kWarpgroupThreads * 4;  // of an M tile
  static constexpr int kXStages = kShares == 1 ? 4 : 8;              // a multiple of kUnit
  static constexpr int kAhead = kXStages / 2;  // K blocks of x that are copied before they are read
  static constexpr int kInFlight = kShares == 2 ? 4 : 2;       // matrix instructions of a group
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;  // that all threads begin with
  static constexpr int kSumRegisters = kGroups == 2 ? 200 : 144,
                       kFeedRegisters = (kGroups + 1) * kRegisters - kGroups * kSumRegisters;
  static_assert(kUnit == 2 && kXStages % kUnit == 0 && kAhead % kUnit == 0 &&
                kTokenTiles % kGroupWarps == 0);
};

// The K blocks of a CTA's columns, unit after unit: those of the first positions in all K chunks,
// then those of the next ones. So the sums of a position are done before the next ones begin.
template <typename Size>
struct Walk {
  int blocks;     // of the CTA
  int first = 0;  // K block of the unit

  // Behind the last unit comes the first one.
  __device__ void advance() {
    first += kKBlocks;
    if (first < blocks) return;
    first = first % kKBlocks + Size::kUnit;
    if (first >= blocks || first >= kKBlocks) first = 0;
  }
};

// Where things lie in a CTA's shared memory, in bytes from its start; the host sizes the launch
// with it.
template <typename Size>
struct Layout {
  // of_x: of each stage's tokens, sums of x for int4, and what its parts were divided by for fp8.
  int ring, x, total, gain, squares, of_x, old, peer, barriers, end;

  constexpr __host__ __device__ Layout(int ring_bytes, int pass_tiles, int peer_tiles, int k,
                                       bool normalizes, bool adds)
      : ring(0),
        x(ring + ring_bytes),
        total(x + Size::kXStages * Size::kXBytes),
        gain(total + Size::kMTiles * Size::kTotalBytes),
        squares(gain + (normalizes ? (k * 2 + 127) / 128 * 128 : 0)),
        of_x(squares + (normalizes ? kKBlocks * Size::kTokens * 4 : 0)),
        old(of_x + Size::kXStages * Size::Load::kGroups * Size::kTokens * 4),
        peer(old + (adds ? pass_tiles * kTileRows * Size::kTokens * 2 : 0)),
        barriers(peer + peer_tiles * kTileRows * Size::kTokens * 4),
        end(barriers + kBarriers * static_cast<int>(sizeof(Barrier))) {}

  static constexpr int kBarriers = kMaxStages + 3 * Size::kXStages + Size::kShares + 1;
};

// In shared memory.
template <typename Size>
struct Barriers {
  Barrier* weights;  // by stage: they have landed
  Barrier* landed;   // by stage of x: it has,
  Barrier* ready;    // and is prepared;
  Barrier* empty;    // it is read, and so are the weights that it was multiplied with
  Barrier* added;    // by share: the sums of its positions are in the total
  Barrier* arrived;  // the peer's sums have

  __device__ explicit Barriers(unsigned char* at)
      : weights(reinterpret_cast<Barrier*>(at)),
        landed(weights + kMaxStages),
        ready(landed + Size::kXStages),
        empty(ready + Size::kXStages),
        added(empty + Size::kXStages),
        arrived(added + Size::kShares) {}

  __device__ void init(int stages) const {
    const int i = threadIdx.x;
    if (i < stages) init_barrier(&weights[i], 1);
    if (i < Size::kXStages) {
      init_barrier(&landed[i], 1);
      init_barrier(&ready[i], kUnitWarps);
      init_barrier(&empty[i], kGroupWarps * Size::kMTiles);
    }
    if (i < Size::kShares) init_barrier(&added[i], kGroupWarps);
    if (i == 0) init_barrier(arrived, 1);
    if (i < kWarpSize) fence_barriers();
  }
};

// A stage of a ring.
struct Place {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance(int by, int stages) {
    index += by;
    if (index < stages) return;
    index -= stages;
    parity ^= 1;
  }
};

__device__ inline int blocks_of(const CtaTiles& range) { return range.k / kBlockColumns; }

__device__ inline int m_tiles_of(const Params& p, const CtaTiles& range) {
  return (range.tiles + p.m_tile_tiles - 1) / p.m_tile_tiles;
}

}  // namespace photon::cuda::stream_linear::mid_stored
