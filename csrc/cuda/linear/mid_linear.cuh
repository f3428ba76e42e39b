// The Hopper linears for more tokens, up to 64.
//
// A CTA has two warpgroups. Of every K chunk the first one takes the first half of the K blocks and
// the second one the other half, two K blocks a step. They have rings and sums of their own, which
// are added up at the end of a pass. Four tiles are an M tile, the 64 rows of a warpgroup's matrix
// instruction. Its left operand is the weights, as they lie in shared memory; its right operand is
// the tokens. An M tile may have fewer than four tiles. The instruction then multiplies whatever
// lies behind them in shared memory, and those results are not used. A pass over x serves as many M
// tiles as registers hold sums for.
//
// Tensor copies bring what a step needs. The weights of an M tile are a stage of one ring; as many
// as fit are requested before the kernel before this one has ended. All tokens' columns of x are a
// stage of another ring, requested after that kernel has ended. A warpgroup that has read a stage
// fills it again, each warp a tile.
//
// Where tokens are to be normalized, a step's columns are squared, and multiplied by the gains in
// shared memory. Where an SM holds two CTAs, these have a third warp group for that, which works
// while the other two multiply the step before; else the warps do it that are to multiply.
#pragma once
#include "cuda/linear/stream_common.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear {

namespace mid {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * kWarpgroupThreads;  // that multiply
constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kGroupKBlocks = kKBlocks / kGroups;  // of a K chunk
constexpr int kStepKBlocks = 2;
constexpr int kKChunkSteps = kGroupKBlocks / kStepKBlocks;
constexpr int kRowTileBytes = kStepKBlocks * kKBlockBytes;
constexpr int kTileBytes = 2 * kRowTileBytes;
constexpr int kMTileTiles = kWarpgroupRows / kTileRows;
constexpr int kMTileBytes =
    kMTileTiles * kTileBytes;  // what an instruction reads of a stage, whatever the stage holds
constexpr int kLeastXStages = 2, kMaxXStages = 8;
constexpr int kPartialPitch =
    18;  // floats per token of a tile's sums: 16 rows, and 2 for the writers' banks
constexpr int kFirstGroup = 1;  // number of its barrier
constexpr int kBothGroups = kFirstGroup + kGroups, kThirdGroup = kBothGroups + 1;  // of theirs
static_assert(kGroupWarps == kGroups * kStepKBlocks);  // of the third, each has a group's K block

// How many tokens and M tiles a kernel holds in registers, and how many of its CTAs an SM is to
// hold.
template <int kTokens_, int kMTiles_, int kResidents_>
struct Size {
  static constexpr int kTokens = kTokens_, kMTiles = kMTiles_, kResidents = kResidents_;
  static constexpr int kTokenTiles = kTokens / kTokenTile;
  static constexpr int kXKBlockBytes = kTokens * kKBlockColumns * 2;
  static constexpr int kXBytes = kStepKBlocks * kXKBlockBytes;  // of a stage
  static constexpr int kSums = kTokens / 2;  // of a lane, for one K block of an M tile
  static constexpr int kPartialBytes = kMTiles * kMTileTiles * kTokens * kPartialPitch * 4;
};

// Who normalizes x.
enum class Norm { kNone, kGroups, kThird };

template <typename Size, Epilogue kEpilogue>
constexpr Norm kNormBy = kEpilogue == Epilogue::kAdd ? Norm::kNone
                         : Size::kResidents == 2     ? Norm::kThird
                                                     : Norm::kGroups;

// Threads of a CTA.
template <typename Size, Epilogue kEpilogue>
constexpr int kCtaThreads =
    kThreads + (kNormBy<Size, kEpilogue> == Norm::kThird ? kWarpgroupThreads : 0);

// Registers of a thread that multiplies and of one of the third group: of 2 x 3 x 128 threads each
// begins with 80.
constexpr int kSumRegisters = 96, kThirdRegisters = 3 * 80 - 2 * kSumRegisters;

// Where things lie in a CTA's shared memory, in bytes from its start; the host sizes the launch
// with it.
template <typename Size>
struct Layout {
  static constexpr bool kPartialFits = Size::kPartialBytes <= kLeastXStages * Size::kXBytes;

  int ring, x_ring, partial, gain, squares, old, peer, barriers, end;

  // The sums of an only pass lie where the first group's x was, which has been read by then.
  constexpr __host__ __device__ Layout(int ring_bytes, int x_bytes, bool has_one_pass,
                                       int peer_tiles, int k, bool normalizes, bool adds)
      : ring(0),
        x_ring(ring + ring_bytes),
        partial(has_one_pass && kPartialFits ? x_ring : x_ring + x_bytes),
        gain(x_ring + x_bytes + (has_one_pass && kPartialFits ? 0 : Size::kPartialBytes)),
        squares(gain + (normalizes ? (k * 2 + 127) / 128 * 128 : 0)),
        old(squares + (normalizes ? kKBlocks * Size::kTokens * 4 : 0)),
        peer(old + (adds ? Size::kMTiles * kWarpgroupRows * Size::kTokens * 2 : 0)),
        barriers(peer + peer_tiles * kTileRows * Size::kTokens * 4),
        end(barriers + count_barriers(normalizes) * static_cast<int>(sizeof(Barrier))) {}

  // Those of the groups; that the peer's sums are there; and the third group's.
  static constexpr __host__ __device__ int count_barriers(bool normalizes) {
    return kGroups * (kMaxStages + kMaxXStages) + 1 +
           (normalizes && Size::kResidents == 2 ? kGroups * kMaxXStages + 1 : 0);
  }
};

__host__ __device__ inline bool has_one_pass(const Params& p) {
  return p.most_tiles <= p.m_tile_tiles * p.pass_tiles;
}

__device__ inline int m_tiles_of(const Params& p, const CtaTiles& range) {
  return (range.tiles + p.m_tile_tiles - 1) / p.m_tile_tiles;
}

// The first K block of a group's first step, counted from the CTA's first one; and the first K
// block of the step that comes after the one that begins with `k_block`.
__device__ inline int first_k_block(int group) { return group * kGroupKBlocks; }
static_assert(kKChunkSteps == 2);
__device__ inline int next_k_block(int k_block) {
  return k_block + (k_block % kGroupKBlocks == 0 ? kStepKBlocks : kKBlocks - kStepKBlocks);
}

// What one of the warpgroups does.
struct Group {
  int index, warp;  // warp: in the group
  int m_tiles, steps;
  int fewer_steps;  // than the other group

  __device__ Group(const Params& p, const CtaTiles& range)
      : Group(p, range, of_warp(threadIdx.x / kWarpgroupThreads),
              of_warp(threadIdx.x / kWarpSize % kGroupWarps)) {}

  __device__ Group(const Params& p, const CtaTiles& range, int index, int warp)
      : index(index), warp(warp), m_tiles(m_tiles_of(p, range)) {
    steps = steps_of(index, range);
    fewer_steps = steps_of(0, range) - steps;
  }

  __device__ void sync() const { sync_threads(kFirstGroup + index, kWarpgroupThreads); }

 private:
  __device__ static int steps_of(int index, const CtaTiles& range) {
    const int before =
        index * kGroupKBlocks * kKBlockColumns;  // columns of a K chunk that are not the group's
    return range.k > before ? (range.k - before + kKChunk - 1) / kKChunk * kKChunkSteps : 0;
  }
};

// The stage of a ring whose turn it is. Its places are carried along, because a step would have to
// wait if they were computed anew.
struct Turn {
  int stage, full;  // bytes from the start of shared memory
  uint32_t parity = 0;

  __device__ explicit Turn(const Ring& ring)
      : stage(offset_of(ring.at)), full(offset_of(ring.full)) {}

  __device__ unsigned char* place() const { return dynamic_shared() + stage; }
  __device__ Barrier* barrier() const {
    return reinterpret_cast<Barrier*>(dynamic_shared() + full);
  }
  __device__ void wait() const { wait_barrier(barrier(), parity); }

  __device__ void advance(const Ring& ring) {
    stage += ring.stage_bytes;
    full += static_cast<int>(sizeof(Barrier));
    if (stage != offset_of(ring.at) + ring.stages * ring.stage_bytes) return;
    stage = offset_of(ring.at);
    full = offset_of(ring.full);
    parity ^= 1;
  }

 private:
  __device__ static int offset_of(const void* place) {
    return static_cast<int>(static_cast<const unsigned char*>(place) - dynamic_shared());
  }
};

// Fills the group's ring of weights, with the M tiles of each step of each pass in turn. Each warp
// requests one tile of an M tile, and the first warp announces the bytes of all of them.
template <Epilogue kEpilogue>
struct Filler {
  const Params& p;
  const CtaTiles& range;
  const Group& group;
  const Ring& ring;
  Pass pass;  // of what is copied next
  int k_block, m_tile = 0, step = 0;
  TileRows rows;  // of the warp's tile of the M tile
  int bytes;      // of the M tile
  bool has_tile;

  __device__ Filler(const Params& p, const CtaTiles& range, const Group& group, const Ring& ring)
      : p(p),
        range(range),
        group(group),
        ring(ring),
        pass(pass_from(0, p.pass_tiles, group.steps > 0 ? group.m_tiles : 0)),
        k_block(first_k_block(group.index)) {
    find_rows();
  }

  __device__ void fill() {
    Turn turn(ring);
#pragma unroll 1
    for (int i = 0; i < ring.stages; ++i, turn.advance(ring)) refill(turn);
  }

  __device__ bool is_done() const { return pass.count <= 0; }

  // All of the group have read the stage.
  __device__ void refill(const Turn& turn) {
    if (is_done()) return;
    if (has_tile && is_elected()) copy(turn);
    if (++m_tile == pass.count) {
      m_tile = 0;
      k_block = next_k_block(k_block);
      if (++step == group.steps) {
        step = 0;
        k_block = first_k_block(group.index);
        pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, group.m_tiles);
      } else if (pass.count == 1) {
        return;  // the same rows
      }
    }
    find_rows();
  }

 private:
  __device__ void find_rows() {
    const int first = (pass.first + m_tile) * p.m_tile_tiles,
              tiles = min(p.m_tile_tiles, range.tiles - first);
    has_tile = group.warp < tiles;
    rows = tile_rows<kEpilogue>(p, range, first + group.warp);
    bytes = tiles * kTileBytes -
            (tile_rows<kEpilogue>(p, range, first + tiles - 1).is_whole ? 0 : kRowTileBytes);
  }

  __device__ void copy(const Turn& turn) const {
    unsigned char* place = turn.place() + group.warp * kTileBytes;
    Barrier* full = turn.barrier();
    const RowTileMap& weight = p.weight[range.part];
    if (group.warp == 0) arrive_expecting(full, bytes);
    copy_row_tile(place, weight, rows.first, k_block, full, evict_first());
    if (rows.is_whole)
      copy_row_tile(place + kRowTileBytes, weight, rows.second, k_block, full, evict_first());
  }
};

// Fills the group's ring of x, with each step of each pass in turn. The first warp requests all
// tokens of a step at once.
template <typename Size>
struct XFiller {
  const Params& p;
  const Group& group;
  const Ring& ring;
  int first;           // the CTA's first K block
  int k_block;         // that is copied next, counted from `first`
  int left, step = 0;  // steps to be copied, of all passes; the one that is copied next

  __device__ XFiller(const Params& p, const CtaTiles& range, const Group& group, const Ring& ring)
      : p(p),
        group(group),
        ring(ring),
        first(range.column / kKBlockColumns),
        k_block(first_k_block(group.index)),
        left((group.m_tiles + p.pass_tiles - 1) / p.pass_tiles * group.steps) {}

  __device__ void fill() {
    Turn turn(ring);
#pragma unroll 1
    for (int i = 0; i < ring.stages; ++i, turn.advance(ring)) refill(turn);
  }

  __device__ bool is_done() const { return left <= 0; }

  // All of the group have read the stage.
  __device__ void refill(const Turn& turn) {
    if (is_done()) return;
    if (group.warp == 0 && is_elected()) {
      arrive_expecting(turn.barrier(), Size::kXBytes);
      copy_row_tile(turn.place(), p.tokens_map, 0, first + k_block, turn.barrier(), evict_last());
    }
    --left;
    k_block = next_k_block(k_block);
    if (++step < group.steps) return;
    step = 0;
    k_block = first_k_block(group.index);
  }
};

// A warpgroup's sums, as seen from a lane.
template <typename Size, Norm kNorm>
struct Multiplier {
  static constexpr int kMTiles = Size::kMTiles;
  static constexpr int kKBlockWarps = kGroupWarps / kStepKBlocks;  // that normalize a K block
  static constexpr int kOwnTiles = Size::kTokenTiles / kKBlockWarps;

  const CtaTiles& range;
  const Group& group;
  const Ring& ring;
  const Ring& x_ring;
  Turn turn, x_turn;
  int own_vector;  // bytes from a stage's start to the first vector that the lane normalizes
  int own_gain, gains_end;  // of the vector of the step that comes next; and of all; in bytes from
                            // the start of shared memory
  float sums[kMTiles][kGroupKBlocks][Size::kSums];
  float squares[kKChunkSteps][kOwnTiles][2];  // of the warp's K block in each step of a K chunk,
                                              // and of the tokens that are its own

  __device__ Multiplier(const CtaTiles& range, const Group& group, const Ring& ring,
                        const Ring& x_ring)
      : range(range),
        group(group),
        ring(ring),
        x_ring(x_ring),
        turn(ring),
        x_turn(x_ring),
        own_vector(computed_now(own_k_block() * Size::kXKBlockBytes + own_tokens() * kKBlockBytes +
                                LaneVectors().offset(0))) {}

  // The K block of a step that the warp normalizes, and the first of its tiles of tokens.
  __device__ int own_k_block() const { return group.warp / kKBlockWarps; }
  __device__ int own_tokens() const { return group.warp % kKBlockWarps * kOwnTiles; }

  // The sums of one pass over x. `gains`: where they are in shared memory.
  template <typename Filler, typename XFiller>
  __device__ void run(const Pass& pass, Filler& filler, XFiller& x_filler, int gains,
                      const Stamps& stamps) {
    clear();
    own_gain = computed_now(gains + ((first_k_block(group.index) + own_k_block()) * kKBlockColumns +
                                     LaneVectors().column(0)) *
                                        2);
    gains_end = gains + range.k * 2;
    const int m_tiles = of_warp(
        pass.count);  // or the compiler takes what follows for something that lanes may do apart
#pragma unroll 1
    for (int step = 0; step < group.steps; step += kKChunkSteps) {
#pragma unroll
      for (int i = 0; i < kKChunkSteps; ++i) {
        wait_barrier(x_turn.barrier() + (kNorm == Norm::kThird ? kMaxXStages : 0), x_turn.parity);
        if (step == 0 && i == 0 && pass.first == 0) stamps.at(Point::kLoaded);
        add_step(i, m_tiles, filler, x_filler);
      }
    }
    // Both groups pass their barrier equally often. Otherwise compute-sanitizer takes what lies
    // before and behind a barrier of the whole CTA for a race.
#pragma unroll 1
    for (int reductions = group.fewer_steps * (pass.count + (kNorm == Norm::kGroups ? 1 : 0));
         reductions > 0; --reductions)
      group.sync();
  }

  // The sum of the group's K blocks, as d[i] of an instruction, added to `before`, the sum of the
  // K blocks before.
  __device__ float total(int m_tile, int i, float before) const {
#pragma unroll
    for (int k_block = 0; k_block < kGroupKBlocks; ++k_block) before += sums[m_tile][k_block][i];
    return before;
  }

  // The same where there are no K blocks before.
  __device__ float total(int m_tile, int i) const {
    float sum = sums[m_tile][0][i];
#pragma unroll
    for (int k_block = 1; k_block < kGroupKBlocks; ++k_block) sum += sums[m_tile][k_block][i];
    return sum;
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kKChunkSteps; ++i) {
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) squares[i][n][0] = squares[i][n][1] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int k_block = 0; k_block < kGroupKBlocks; ++k_block) {
#pragma unroll
        for (int i = 0; i < Size::kSums; ++i) sums[m][k_block][i] = 0.0f;
      }
    }
  }

  // `i`: of the steps of its K chunk. Its x is there.
  template <typename Filler, typename XFiller>
  __device__ void add_step(int i, int m_tiles, Filler& filler, XFiller& x_filler) {
    unsigned char* const x = x_turn.place();
    if constexpr (kNorm == Norm::kGroups) {
      normalize_step(x, i, squares[i]);
      fence_async_shared();
      group.sync();
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if (m > 0 && m >= m_tiles) break;  // there is always a first one
      turn.wait();
      multiply(&sums[m][i * kStepKBlocks], RowTileFragment(turn.place()), RowTileFragment(x));
      group.sync();
      filler.refill(turn);
      turn.advance(ring);
    }
    x_filler.refill(x_turn);
    x_turn.advance(x_ring);
  }

  __device__ static void multiply(float (*sums)[Size::kSums], const RowTileFragment& weights,
                                  const RowTileFragment& x) {
    warpgroup_begin();
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
      for (int k_block = 0; k_block < kStepKBlocks; ++k_block) {
        const RowTileFragment tokens = x.after(k_block * Size::kXKBlockBytes);
        warpgroup_multiply<kRowTileBytes, kKBlockBytes>(
            sums[k_block], weights.after(k_block * kKBlockBytes), tokens, depth);
      }
    }
    warpgroup_wait();
  }

  // Normalizes the warp's tokens in the warp's K block. A lane's vectors of the second half lie
  // where bit 2 of a vector's number is inverted.
  __device__ void normalize_step(unsigned char* x, int i, float (&squares)[kOwnTiles][2]) {
    constexpr int kHalfVectors = kKBlockColumns * 2 / kHalves;  // bytes
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint4 gains = make_uint4(0, 0, 0, 0);
      if (own_gain < gains_end)
        gains = *reinterpret_cast<const uint4*>(dynamic_shared() + own_gain + half * kHalfVectors);
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) {
        uint4* place =
            reinterpret_cast<uint4*>(x + (own_vector ^ half * kHalfVectors) + n * kKBlockBytes);
        uint4 v = *place;
        normalize(v, gains, squares[n]);
        *place = v;
      }
    }
    own_gain +=
        (i + 1 < kKChunkSteps ? kStepKBlocks : kKBlocks - (kKChunkSteps - 1) * kStepKBlocks) *
        kKBlockColumns * 2;
  }
};

// A warp of the third group, as seen from a lane: it normalizes a K block of each step of a group.
// The sums of squares, [K block][tokens], are in shared memory from step to step, because registers
// are few.
template <typename Size>
struct Normalizer {
  static constexpr int kTiles = Size::kTokenTiles;

  const Group& group;
  const Ring& x_ring;
  Turn turn;
  int own_vector;  // bytes from a stage's start to the first vector that the lane normalizes
  int first_gain, own_gain, gains_end;  // of the first vector, of that of the step that comes next,
                                        // and of all; in bytes from the start of shared memory
  float* own_squares;                   // of the first step of a K chunk and the first tile
  bool has_squares;                     // the lane keeps its token's
  bool is_odd;                          // and normalize() has them in the second of two

  // `gains`: where they are in shared memory.
  __device__ Normalizer(const CtaTiles& range, const Group& group, const Ring& x_ring, int gains,
                        float* squares)
      : group(group),
        x_ring(x_ring),
        turn(x_ring),
        own_vector(computed_now(group.warp * Size::kXKBlockBytes + LaneVectors().offset(0))),
        first_gain(
            computed_now(gains + (own_k_block() * kKBlockColumns + LaneVectors().column(0)) * 2)),
        gains_end(gains + range.k * 2),
        own_squares(squares + own_k_block() * Size::kTokens + LaneVectors().row()),
        has_squares(LaneVectors().group / 2 == LaneVectors().thread),
        is_odd(LaneVectors().group % 2 != 0) {}

  // Before the first pass.
  __device__ void clear_squares() const {
    if (!has_squares) return;
#pragma unroll
    for (int i = 0; i < kKChunkSteps * kTiles; ++i)
      own_squares[i / kTiles * kStepKBlocks * Size::kTokens + i % kTiles * kTokenTile] = 0.0f;
  }

  // One pass over x.
  __device__ void run() {
    own_gain = first_gain;
#pragma unroll 1
    for (int step = 0; step < group.steps; ++step) {
      const bool is_second = step % kKChunkSteps != 0;
      turn.wait();
      normalize_step(turn.place(), own_squares + (is_second ? kStepKBlocks * Size::kTokens : 0));
      fence_async_shared();
      __syncwarp();
      if (is_elected()) arrive(turn.barrier() + kMaxXStages);
      turn.advance(x_ring);
      own_gain += (is_second ? kKBlocks - kStepKBlocks : kStepKBlocks) * kKBlockColumns * 2;
    }
  }

 private:
  // Of the first step of a K chunk.
  __device__ int own_k_block() const { return first_k_block(group.index) + group.warp; }

  // Normalizes the warp's K block. A lane's vectors of the second half lie where bit 2 of a
  // vector's number is inverted.
  __device__ void normalize_step(unsigned char* x, float* squares) {
    constexpr int kHalfVectors = kKBlockColumns * 2 / kHalves;  // bytes
    uint4 gains[kHalves] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (own_gain < gains_end)
        gains[half] =
            *reinterpret_cast<const uint4*>(dynamic_shared() + own_gain + half * kHalfVectors);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float before = has_squares ? squares[n * kTokenTile] : 0.0f;
      float sums[2] = {is_odd ? 0.0f : before, is_odd ? before : 0.0f};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint4* place =
            reinterpret_cast<uint4*>(x + (own_vector ^ half * kHalfVectors) + n * kKBlockBytes);
        uint4 v = *place;
        normalize(v, gains[half], sums);
        *place = v;
      }
      if (has_squares) squares[n * kTokenTile] = is_odd ? sums[1] : sums[0];
    }
  }
};

// All threads that multiply.
template <Norm kNorm>
__device__ inline void sync_both_groups() {
  if constexpr (kNorm == Norm::kThird) {
    sync_threads(kBothGroups, kThreads);
  } else {
    __syncthreads();
  }
}

// The end of a pass: the second group adds the first group's sums, in shared memory, to its own,
// and they become outputs.
template <typename Size, Epilogue kEpilogue>
struct Finish {
  static constexpr Norm kBy = kNormBy<Size, kEpilogue>;
  using Sums = Multiplier<Size, kBy>;
  // How many tokens of a tile, or of several tiles, all threads take at once.
  static constexpr int kTokensAtOnce =
      Size::kTokens < kThreads / kRowTileRows ? Size::kTokens : kThreads / kRowTileRows;
  static constexpr int kTilesAtOnce = kThreads / kRowTileRows / kTokensAtOnce;

  const Params& p;
  const CtaTiles& range;
  float* partial;    // [tile][token][kPartialPitch]
  float* squares;    // [K block][tokens]
  Barrier* squared;  // the third group's are there
  int active;        // tokens that live

  // All threads together.
  __device__ void run(const Sums& sums, const Pass& pass, const Output<kEpilogue>& output) const {
    if constexpr (kBy == Norm::kGroups) put_squares(sums);
    if (sums.group.index == 0)
      for_sums(sums, pass,
               [](float* place, const Sums& own, int m, int i) { *place = own.total(m, i); });
    sync_both_groups<kBy>();
    if (sums.group.index == 1)
      for_sums(sums, pass, [](float* place, const Sums& own, int m, int i) {
        *place = own.total(m, i, *place);
      });
    if constexpr (kBy == Norm::kNone) wait_copies<0>();
    sync_both_groups<kBy>();
    if constexpr (kBy == Norm::kThird) wait_barrier(squared, 0);
    const int tiles = min(pass.count * p.m_tile_tiles, range.tiles - output.first_tile);
    const int g = threadIdx.x % kRowTileRows, place = threadIdx.x / kRowTileRows;
#pragma unroll 1
    for (int token = place % kTokensAtOnce; token < active; token += kTokensAtOnce) {
      const float scale = output.scale(token);
#pragma unroll 1
      for (int tile = place / kTokensAtOnce; tile < tiles; tile += kTilesAtOnce) {
        const float* sum = partial + (tile * Size::kTokens + token) * kPartialPitch + g;
        output.take(tile, g, token, scale, sum[0], sum[kRowTileRows]);
      }
    }
  }

 private:
  __device__ void put_squares(const Sums& sums) const {
    const LaneVectors at;
    if (at.group / 2 != at.thread) return;
#pragma unroll
    for (int i = 0; i < kKChunkSteps; ++i) {
      const int k_block = first_k_block(sums.group.index) + i * kStepKBlocks + sums.own_k_block();
#pragma unroll
      for (int n = 0; n < Sums::kOwnTiles; ++n) {
        squares[k_block * Size::kTokens + (sums.own_tokens() + n) * kTokenTile + at.row()] =
            at.group % 2 == 0 ? sums.squares[i][n][0] : sums.squares[i][n][1];
      }
    }
  }

  // body(where it belongs, sums, M tile, its number) for each sum of the lane; a warp has a tile of
  // each M tile.
  template <typename Body>
  __device__ void for_sums(const Sums& sums, const Pass& pass, const Body& body) const {
    const int lane_group = threadIdx.x % kWarpSize / 4, thread = threadIdx.x % 4;
    if (sums.group.warp >= p.m_tile_tiles) return;
#pragma unroll
    for (int m = 0; m < Size::kMTiles; ++m) {
      if (m >= pass.count) break;
      float* tokens =
          partial +
          ((m * p.m_tile_tiles + sums.group.warp) * Size::kTokens + 2 * thread) * kPartialPitch +
          lane_group;
#pragma unroll
      for (int i = 0; i < Size::kSums; ++i) {
        body(tokens + (i / 4 * kTokenTile + i % 2) * kPartialPitch + i / 2 % 2 * kRowTileRows, sums,
             m, i);
      }
    }
  }
};

// The barriers of a group. Where a third one normalizes x, those by which it says so of a stage
// come behind those that say that it has landed.
template <Norm kNorm>
struct Barriers {
  Barrier *full, *x_full;

  __device__ Barriers(unsigned char* at, int group)
      : full(reinterpret_cast<Barrier*>(at) +
             group * (kMaxStages + (kNorm == Norm::kThird ? 2 : 1) * kMaxXStages)),
        x_full(full + kMaxStages) {}
};

// By `threads` threads, of which this is number `thread`.
__device__ inline void fetch_gains(const Params& p, unsigned char* to, int thread, int threads) {
#pragma unroll 1
  for (int i = thread; i < p.k / 8; i += threads) async_copy16(to + i * 16, p.gain + i * 8, true);
  commit_copies();
}

// What has to be done before the first copy of a weight. The gains are on their way when this
// returns, unless a third group fetches them.
template <Epilogue kEpilogue, Norm kNorm>
__device__ void begin_block(const Params& p, unsigned char* gains, const Barriers<kNorm>& barriers,
                            Barrier* arrived, int part) {
  if (threadIdx.x == 0) {
    prefetch_row_tile_map(p.weight[part]);
    prefetch_row_tile_map(p.tokens_map);
    init_barrier(arrived, 1);
    if (kNorm == Norm::kThird) init_barrier(arrived + 1, kGroupWarps);
  }
  const int i = threadIdx.x % kWarpgroupThreads;
  if (kNorm != Norm::kThird || threadIdx.x < kThreads) {
    if (i < p.stages) init_barrier(&barriers.full[i], 1);
    if (i < p.x_stages) init_barrier(&barriers.x_full[i], 1);
    if (kNorm == Norm::kThird && i < p.x_stages)
      init_barrier(&barriers.x_full[kMaxXStages + i], kStepKBlocks);
  }
  if (i < kWarpSize) fence_barriers();
  __syncthreads();
  if (is_split<kEpilogue>(p)) {
    enter_cluster();
    meet_cluster();  // the neighbour has initialized `arrived` before anything is sent to it
  }
  if constexpr (kNorm == Norm::kGroups) fetch_gains(p, gains, threadIdx.x, kThreads);
}

// The third warp group: fetches the gains, then normalizes x, step by step of both groups, each
// pass anew.
template <typename Size>
__device__ void normalize_block(const Params& p, const CtaTiles& range, const Layout<Size>& at) {
  unsigned char* const shared = dynamic_shared();
  const int warp = of_warp(threadIdx.x / kWarpSize % kGroupWarps);
  const Group group(p, range, warp / kStepKBlocks, warp % kStepKBlocks);
  const Ring x_ring{shared + at.x_ring + group.index * p.x_stages * Size::kXBytes,
                    Barriers<Norm::kThird>(shared + at.barriers, group.index).x_full, nullptr,
                    p.x_stages, Size::kXBytes};
  fetch_gains(p, shared + at.gain, threadIdx.x % kWarpgroupThreads, kWarpgroupThreads);
  Normalizer<Size> normalizer(range, group, x_ring, at.gain,
                              reinterpret_cast<float*>(shared + at.squares));
  normalizer.clear_squares();
  wait_copies<0>();
  sync_threads(kThirdGroup, kWarpgroupThreads);  // all gains are there
  wait_for_earlier();
#pragma unroll 1
  for (int first = 0; first < group.m_tiles; first += p.pass_tiles) {
    normalizer.run();
    if (first > 0) continue;
    normalizer.has_squares = false;  // they stay, and are read
    if (is_elected()) arrive(Barriers<Norm::kThird>(shared + at.barriers, kGroups).full + 1);
  }
}

template <typename Size, Epilogue kEpilogue>
__device__ void run_block(const Params& p) {
  constexpr Norm kBy = kNormBy<Size, kEpilogue>;
  constexpr bool kNormalizes = kBy != Norm::kNone;
  const Stamps stamps = stamps_of<kEpilogue>(p);
  let_next_start();
  const int counts = live_tokens(p);
  unsigned char* shared = dynamic_shared();
  const CtaTiles range = cta_tiles<kEpilogue>(p);
  const Group group(p, range);
  const Layout<Size> at(kGroups * p.stages * p.stage_bytes, kGroups * p.x_stages * Size::kXBytes,
                        has_one_pass(p), is_split<kEpilogue>(p) ? p.most_tiles : 0, p.k,
                        kNormalizes, !kNormalizes);
  const Barriers<kBy> barriers(shared + at.barriers, group.index);
  Barrier* const arrived = Barriers<kBy>(shared + at.barriers, kGroups).full;
  const Ring ring{shared + at.ring + group.index * p.stages * p.stage_bytes, barriers.full, nullptr,
                  p.stages, p.stage_bytes};
  const Ring x_ring{shared + at.x_ring + group.index * p.x_stages * Size::kXBytes, barriers.x_full,
                    nullptr, p.x_stages, Size::kXBytes};
  begin_block<kEpilogue>(p, shared + at.gain, barriers, arrived, range.part);

  const int active = min(counts, p.tokens);
  if (active <= 0 || range.tiles == 0) {
    wait_copies<0>();
    return wait_for_earlier();
  }
  if constexpr (kBy == Norm::kThird) {
    if (group.index == kGroups) {
      shrink_registers<kThirdRegisters>();
      return normalize_block<Size>(p, range, at);
    }
    grow_registers<kSumRegisters>();
  }
  Filler<kEpilogue> filler(p, range, group, ring);
  XFiller<Size> x_filler(p, range, group, x_ring);
  filler.fill();
  const auto floats = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  Bf16* const old = reinterpret_cast<Bf16*>(shared + at.old);
  Output<kEpilogue> output{
      p, range, floats(at.squares), old, floats(at.peer), arrived, Size::kTokens, 0};
  if (threadIdx.x == 0) output.expect_peer(active);
  Multiplier<Size, kBy> multiplier(range, group, ring, x_ring);
  const Finish<Size, kEpilogue> finish{p,           range, floats(at.partial), floats(at.squares),
                                       arrived + 1, active};
  if constexpr (kBy != Norm::kThird) {
    wait_copies<0>();
    __syncthreads();  // all gains are there
  }
  wait_for_earlier();
  fence_async_global();  // x is read by copies
  x_filler.fill();
  stamps.at(Point::kWaited);

#pragma unroll 1
  for (Pass pass = pass_from(0, p.pass_tiles, group.m_tiles); pass.count > 0;
       pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, group.m_tiles)) {
    output.first_tile = pass.first * p.m_tile_tiles;
    if (pass.first > 0) sync_both_groups<kBy>();  // all have read what the pass before left
    if constexpr (!kNormalizes) {
      output.fetch_old(old, min(pass.count * p.m_tile_tiles, range.tiles - output.first_tile),
                       active, kThreads);
    }
    multiplier.run(pass, filler, x_filler, at.gain, stamps);
    stamps.at(Point::kSummed);
    finish.run(multiplier, pass, output);
    stamps.at(Point::kStored);
  }
}

}  // namespace mid
}  // namespace photon::cuda::stream_linear
