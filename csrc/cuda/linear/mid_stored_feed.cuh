// The warps of a CTA that bring weights and x into shared memory, and prepare x, for those that
// multiply (mid_stored.cuh).
#pragma once
#include "cuda/linear/mid_stored_tiles.cuh"

namespace photon::cuda::stream_linear::mid_stored {

// Fills the ring of weights, for all passes. The first warp requests all rows of a pass at once,
// also where the CTA has fewer: those of its neighbours then come out of L2.
template <typename Size, Epilogue kEpilogue>
struct WeightFiller {
  const Params& p;
  const CtaTiles& range;
  unsigned char* ring;
  Barrier* full;
  Walk<Size> walk;
  Pass pass;
  int stage_of_unit = 0;
  Place place;

  __device__ WeightFiller(const Params& p, const CtaTiles& range, unsigned char* ring,
                          Barrier* full)
      : p(p),
        range(range),
        ring(ring),
        full(full),
        walk{blocks_of(range)},
        pass(pass_from(0, p.pass_tiles, m_tiles_of(p, range))) {}

  __device__ void fill() {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) copy_next();
  }

  // Into the stage that comes next, which is free.
  __device__ void copy_next() {
    if (pass.count <= 0) return;
    if (is_elected()) copy();
    place.advance(1, p.stages);
    if (++stage_of_unit < Size::kUnitStages) return;
    stage_of_unit = 0;
    walk.advance();
    if (walk.first == 0)
      pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, m_tiles_of(p, range));
  }

 private:
  __device__ void copy() const {
    unsigned char* const stage = ring + place.index * p.stage_bytes;
    Barrier* const barrier = &full[place.index];
    const uint64_t policy = evict_first();
    const int column = walk.first / kStageBlocks<typename Size::Load> + stage_of_unit;
    const TileRows rows = tile_rows<kEpilogue>(p, range, pass.first * p.m_tile_tiles);
    arrive_expecting(barrier, p.stage_bytes);
    copy_row_tile(stage, p.weight[range.part], rows.first, column, barrier, policy);
    if (is_swiglu<kEpilogue>(p))
      copy_row_tile(stage + p.stage_bytes / 2, p.weight[range.part], rows.second, column, barrier,
                    policy);
  }
};

// Prepares K blocks of x where they have landed: tokens are multiplied by the gains, and their
// squares summed up, where they are to be normalized; then columns come in the order in which
// weights are decoded.
template <typename Size, bool kNormalizes>
struct Preparer {
  using Load = typename Size::Load;
  static constexpr int kTiles = Size::kTokenTiles / kGroupWarps;  // of a part of the tokens
  static constexpr bool kTakesSums = Load::kExcess > 0;
  // Of a lane's vectors: all, where their largest number counts, else as registers allow.
  static constexpr int kAtOnce = Load::kIsF16 ? kVectors : 2;

  const unsigned char* gains;
  float* squares;  // [position][tokens]
  int part, group, thread;

  // Neighbouring groups of lanes read vectors of different banks.
  __device__ static int row_of(int group) { return group >> 1 | (group & 1) << 2; }
  // The first token of an eight of the part.
  __device__ int tokens_of(int tile) const { return (part + tile * kGroupWarps) * kTokenTile; }

  // The lane has its token's sum of squares, which lies in shared memory from K block to K block.
  __device__ bool has_squares() const { return group / 2 == thread; }

  __device__ void clear_squares() const {
    if (!has_squares()) return;
#pragma unroll 1
    for (int i = 0; i < kKBlocks * kTiles; ++i)
      squares[i / kTiles * Size::kTokens + tokens_of(i % kTiles) + row_of(group)] = 0.0f;
  }

  // `of_x`: [group][tokens], of the stage.
  __device__ void run(unsigned char* x, int block, bool is_inside, bool adds_squares,
                      float* of_x) const {
    float of_squares[kTiles][2];
    if constexpr (kNormalizes) get_squares(of_squares, block, adds_squares);
    float sums[kTiles][2];
#pragma unroll
    for (int first = 0; first < kVectors; first += kAtOnce) {
      uint4 v[kTiles][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce * kTiles; ++i)
        v[i % kTiles][i / kTiles] =
            Load::read_x(place(x, first + i / kTiles, i % kTiles), row_of(group),
                         (first + i / kTiles) % kHalves, thread);
      __syncwarp();
#pragma unroll
      for (int h = first; h < first + kAtOnce; ++h) {
        uint4 gain = make_uint4(0, 0, 0, 0);
        if (kNormalizes && is_inside)
          gain = Load::load_gains(
              gains + (block * kBlockColumns + h * 32 + thread * Load::kLaneColumns) * 2);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint4& own = v[t][h - first];
          if constexpr (kNormalizes) normalize(own, gain, of_squares[t]);
          Load::order(own);
          if constexpr (kTakesSums) add_to_sums(sums[t], own, h, t, of_x);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if constexpr (Load::kIsF16) round_tile(v[t], t, of_x);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          put(place(x, first + i, t), (first + i) % kHalves, v[t][i]);
      }
    }
    if constexpr (kNormalizes) put_squares(of_squares, block, adds_squares);
  }

 private:
  __device__ unsigned char* place(unsigned char* x, int h, int tile) const {
    constexpr int kKBlockRow = kKBlockColumns * 2;
    return x + (h / kHalves * Size::kTokens + tokens_of(tile) + row_of(group)) * kKBlockRow;
  }

  // Where the lane's token of its first eight has its sum of squares of the K block's position.
  __device__ float* squares_of(int block) const {
    return squares + block % kKBlocks * Size::kTokens + row_of(group);
  }

  // normalize() has them in the first or the second of two.
  __device__ void get_squares(float (&sums)[kTiles][2], int block, bool adds) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float before = adds && has_squares() ? squares_of(block)[tokens_of(t)] : 0.0f;
      sums[t][0] = group % 2 == 0 ? before : 0.0f;
      sums[t][1] = group % 2 == 0 ? 0.0f : before;
    }
  }
  __device__ void put_squares(const float (&sums)[kTiles][2], int block, bool adds) const {
    if (!adds || !has_squares()) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      squares_of(block)[tokens_of(t)] = group % 2 == 0 ? sums[t][0] : sums[t][1];
  }

  // A word of each of four vectors of a row: what a lane has of two instructions' columns.
  __device__ void put(unsigned char* to, int half, const uint4& v) const {
    const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint32_t*>(to + ((half * 4 + i) ^ row_of(group)) * 16 + thread * 4) =
          words[i];
  }

  __device__ void round_tile(uint4 (&v)[kVectors], int tile, float* of_x) const {
    const float inverse = narrow::round_to_f16(v);
    if (thread == 0) of_x[tokens_of(tile) + row_of(group)] = inverse;
  }

  // All rows of this product are the sums of x over the columns of a group.
  __device__ void add_to_sums(float (&sums)[2], const uint4& v, int h, int tile,
                              float* of_x) const {
    constexpr uint32_t kOnes = 0x3f803f80u;
    constexpr int kEach = kVectors / Load::kGroups;
    if (h % kEach == 0) sums[0] = sums[1] = 0.0f;
    float products[4] = {sums[0], sums[1], 0.0f, 0.0f};
    multiply_bf16(products, {kOnes, 0, kOnes, 0}, {v.x, v.y});
    multiply_bf16(products, {kOnes, 0, kOnes, 0}, {v.z, v.w});
    sums[0] = products[0];
    sums[1] = products[1];
    if (h % kEach + 1 < kEach || group > 0) return;
    float* const to = of_x + h / kEach * Size::kTokens + tokens_of(tile);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      to[row_of(2 * thread + j)] = Load::kHasZeros ? sums[j] : -Load::kExcess * sums[j];
  }
};

// The group of warps that feeds the others. Of a unit's two K blocks two warps prepare one, half of
// the tokens each, and a warp has the same positions in all K chunks: so one K block does not wait
// for the other, and a position's sums of squares stay with their warps.
template <typename Size, Epilogue kEpilogue>
struct Feeder {
  using Load = typename Size::Load;
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;
  static constexpr int kXUnits = Size::kXStages / Size::kUnit,
                       kAhead = Size::kAhead / Size::kUnit;  // units
  static constexpr int kFillingWarp = kGroupWarps - 1;       // that copies weights

  const Params& p;
  const CtaTiles& range;
  unsigned char* shared;
  Layout<Size> at;
  Barriers<Size> barriers;
  int warp, own, share;  // own: K block of a unit; share: of its tokens
  WeightFiller<Size, kEpilogue> weights;
  Walk<Size> x_walk;  // of the unit that is copied next
  Place x_place;

  __device__ Feeder(const Params& p, const CtaTiles& range, unsigned char* shared,
                    const Layout<Size>& at)
      : p(p),
        range(range),
        shared(shared),
        at(at),
        barriers(shared + at.barriers),
        warp(static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps),
        own(warp / kUnitWarps),
        share(warp % kUnitWarps),
        weights(p, range, shared + at.ring, barriers.weights),
        x_walk{blocks_of(range)},
        x_place{own} {}

  __device__ void run() {
    const int lane = threadIdx.x % kWarpSize;
    Preparer<Size, kNormalizes> preparer{
        shared + at.gain, reinterpret_cast<float*>(shared + at.squares), warp, lane / 4, lane % 4};
    if (warp == kFillingWarp) weights.fill();
    if constexpr (kNormalizes) {
      preparer.clear_squares();
      fetch_gains();
    }
    const int units = (blocks_of(range) + Size::kUnit - 1) / Size::kUnit,
              passes = (m_tiles_of(p, range) + p.pass_tiles - 1) / p.pass_tiles,
              all = passes * units;
    wait_for_earlier();
    fence_async_global();  // x is read by copies
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copy_x(i < all);
    Walk<Size> walk{blocks_of(range)};
    Place place{own};
#pragma unroll 1
    for (int i = 0; i < all; ++i) {
      wait_until_read();
      if (warp == kFillingWarp && i + kAhead >= kXUnits) refill();
      copy_x(i + kAhead < all);
      wait_barrier(&barriers.landed[place.index], place.parity);
      float* const of_x =
          reinterpret_cast<float*>(shared + at.of_x) + place.index * Load::kGroups * Size::kTokens;
      const int block = walk.first + own;
#pragma unroll 1
      for (int part = 0; part < kGroupWarps / kUnitWarps; ++part) {
        preparer.part = part * kUnitWarps + share;
        preparer.run(x_of(place.index), block, block < blocks_of(range), i < units, of_x);
      }
      fence_async_shared();
      __syncwarp();
      if (lane == 0) arrive(&barriers.ready[place.index]);
      place.advance(Size::kUnit, Size::kXStages);
      walk.advance();
    }
  }

 private:
  __device__ unsigned char* x_of(int stage) const { return shared + at.x + stage * Size::kXBytes; }

  __device__ void fetch_gains() const {
    constexpr int kFeedBarrier = 2;  // number of its barrier
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroupThreads; i < p.k / 8; i += kWarpgroupThreads)
      async_copy16(shared + at.gain + i * 16, p.gain + i * 8, true);
    commit_copies();
    wait_copies<0>();
    sync_threads(kFeedBarrier, kWarpgroupThreads);
  }

  // For the stages that the next unit is copied to. All warps wait for all of them: so no stage is
  // read twice while a warp waits for it once.
  __device__ void wait_until_read() const {
#pragma unroll
    for (int i = 0; i < Size::kUnit; ++i)
      wait_barrier(&barriers.empty[x_place.index - own + i], x_place.parity ^ 1);
  }

  // Weights into the stages of the unit that was read.
  __device__ void refill() {
#pragma unroll 1
    for (int i = 0; i < Size::kUnitStages; ++i) weights.copy_next();
  }

  // The own K block, into its stage, which is free. Goes on to the next unit also where none is
  // left.
  __device__ void copy_x(bool is_there) {
    if (is_there && share == 0 && is_elected()) {
      Barrier* const barrier = &barriers.landed[x_place.index];
      arrive_expecting(barrier, Size::kXBytes);
      copy_row_tile(x_of(x_place.index), p.tokens_map, 0,
                    (range.column + (x_walk.first + own) * kBlockColumns) / kKBlockColumns, barrier,
                    evict_last());
    }
    x_walk.advance();
    x_place.advance(Size::kUnit, Size::kXStages);
  }
};

}  // namespace photon::cuda::stream_linear::mid_stored
