// What a CTA of the linears of stored weights for more tokens (mid_stored.cuh) does of the work, in
// which order, and where things lie in shared memory.
#pragma once
#include "cuda/linear/prepare_x.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear::mid_stored {

constexpr int kCluster = 2;  // CTAs that share rows
constexpr int kGroups = 4;   // of warps that multiply, each K blocks of its own
constexpr int kMultipliers = kGroups * kWarpgroupThreads;
constexpr int kThreads = kMultipliers + kWarpgroupThreads;  // one group copies
constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kMTileTiles = kWarpgroupRows / kTileRows;
constexpr int kBlockColumns = 128;  // of a K block
constexpr int kRowBytes = 128;      // of a row in a stage of the weights' ring
constexpr int kRowTileBytes = kRowTileRows * kRowBytes;
constexpr int kDepths = kBlockColumns / 16;    // matrix instructions for a K block
constexpr int kTokensAtOnce = 32;              // of an instruction
constexpr int kRingStages = 24, kXStages = 8;  // of weights, at most, and of x: of all groups

// Of a thread, at first and then. Beside a CTA there is room for a warp of prepare_x in each
// quarter of an SM.
constexpr int kRegisters = 88, kSumRegisters = 104, kCopyingRegisters = 24;
static_assert(kGroups * kSumRegisters + kCopyingRegisters == (kGroups + 1) * kRegisters);

// The scales of a weight, and its zero points or offsets, as they lie in memory. Counts are of
// scales.
struct Scales {
  const void* data;
  const void* zeros;  // points or offsets, or null
  int row_groups;     // from row to row
  int block_groups;   // of a K block; 0: a row has one
  int row_shift;      // 2^row_shift rows share theirs
  bool is_half;       // of integers: float16, else bfloat16
};

struct Params : stream_linear::Params {
  Scales scales;
  PreparedX prepared;
};

// K blocks that a stage of the weights' ring holds.
template <typename Load>
constexpr int kStageBlocks = Load::kBlocks == kKBlocks ? 1 : 2;

template <typename Load_, int kTokens_, Epilogue kEpilogue_>
struct Size {
  using Load = Load_;
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  static constexpr int kTokens = kTokens_, kTokenTiles = kTokens / kTokenTile;
  static constexpr int kMTiles = kTokens > 32 ? 1 : 2;           // of a pass
  static constexpr int kOwnTokenTiles = kTokenTiles / kCluster;  // whose outputs a CTA writes
  static constexpr int kHalves = kTokens / kTokensAtOnce;
  static constexpr int kSums = kTokensAtOnce / 2;                    // of a lane, of an M tile
  static constexpr int kXBytes = kTokensAtOnce * kBlockColumns * 2;  // of a K block
  static constexpr int kRings = kGroups / kStageBlocks<Load>;        // of weights
  // What each group of a cluster sends a CTA of an M tile.
  static constexpr int kSentBytes = kOwnTokenTiles * kWarpgroupThreads * 16;
  static constexpr int kSenders = kCluster * kGroups;
  static_assert(kTokenTiles % kCluster == 0);
};

// What a CTA does. Both CTAs of a cluster have the same rows, and half of the columns: of each K
// chunk half of the positions, or where columns have two parts, one of these. A group takes every
// fourth K block, position by position.
struct CtaWork {
  CtaTiles range;    // columns: of the part
  int rank, blocks;  // blocks: K blocks of the part
  int first, turns;  // position of the first group, and how many a group has

  template <Epilogue kEpilogue>
  __device__ static CtaWork of(const Params& p) {
    CtaWork work;
    work.rank = static_cast<int>(cluster_rank());
    work.range = tiles_of<kEpilogue>(p, static_cast<int>(blockIdx.x) / kCluster);
    const bool has_parts = is_split<kEpilogue>(p);
    work.range.part = has_parts ? work.rank : 0;
    work.range.column = work.range.part * p.k_each;
    work.range.k = min(p.k_each, p.k - work.range.column);
    work.blocks = work.range.k / kBlockColumns;
    work.first = has_parts ? 0 : work.rank * kGroups;
    work.turns = has_parts ? kKBlocks / kGroups : 1;
    return work;
  }

  // body(first K block of a unit, how many there are): for each K chunk those of all groups.
  template <typename Body>
  __device__ void for_units(const Body& body) const {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll 1
      for (int block = first + turn * kGroups; block < blocks; block += kKBlocks)
        body(block, min(blocks - block, kGroups));
    }
  }
};

// Where things lie in a CTA's shared memory, in bytes from its start; the host sizes the launch
// with it.
template <typename Size>
struct Layout {
  // sent: sums from all groups of the cluster. of_x: what comes with a stage of x.
  int ring, x, sent, squares, of_x, old, barriers, end;

  constexpr __host__ __device__ Layout(int ring_bytes, int pass_m_tiles, int pass_tiles)
      : ring(0),
        x(ring + ring_bytes),
        sent(x + kXStages * Size::kXBytes),
        squares(sent + pass_m_tiles * Size::kSenders * Size::kSentBytes),
        of_x(squares + (Size::kAdds ? 0 : kKBlocks * Size::kTokens * 4)),
        old(of_x + kXStages * Size::Load::kXRows * kTokensAtOnce * 4),
        barriers(old + (Size::kAdds ? pass_tiles * kTileRows * Size::kTokens * 2 : 0)),
        end(barriers + kBarriers * static_cast<int>(sizeof(Barrier))) {}

  static constexpr int kBarriers = 2 * (kRingStages + kXStages) + 3;
};

// In shared memory.
template <typename Size>
struct Barriers {
  Barrier* weights;  // by stage: they have landed,
  Barrier* read;     // and are in registers
  Barrier* x;        // by stage: it has landed,
  Barrier* x_read;   // and is read
  Barrier* sent;     // the cluster's sums are here,
  Barrier* taken;    // and those that this CTA sent have been added
  Barrier* squared;  // sums of squares have landed

  __device__ explicit Barriers(unsigned char* at)
      : weights(reinterpret_cast<Barrier*>(at)),
        read(weights + kRingStages),
        x(read + kRingStages),
        x_read(x + kXStages),
        sent(x_read + kXStages),
        taken(sent + 1),
        squared(taken + 1) {}

  __device__ void init(int stages) const {
    const int i = threadIdx.x;
    if (i < Size::kRings * stages) {
      init_barrier(&weights[i], 1);
      init_barrier(&read[i], kGroupWarps * kStageBlocks<typename Size::Load>);
    }
    if (i < kXStages) {
      init_barrier(&x[i], 1 + kWarpSize);
      init_barrier(&x_read[i], kWarpgroupThreads);
    }
    if (i == kWarpSize) {
      init_barrier(sent, 1);
      init_barrier(taken, kCluster * kGroups * kGroupWarps);
      init_barrier(squared, kWarpSize);
    }
    if (i < 2 * kWarpSize) fence_barriers();
  }
};

}  // namespace photon::cuda::stream_linear::mid_stored
