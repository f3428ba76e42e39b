// The Hopper linears of weights of fewer bits for 33 to 64 tokens: a weight is read once.
//
// The left operand of a warpgroup's matrix instruction is 64 rows of the weight, an M tile, in
// registers, where they are decoded as in the narrow linears; the right one is the tokens, in
// shared memory. A CTA has as many groups of warps as a pass has M tiles, or two that share the K
// blocks of its only one. One more group feeds them: tensor copies bring the weights into a ring,
// and x into another, where this group puts its columns into the order in which weights are
// decoded.
//
// The sums are those of the narrow linears, in their order (narrow_linear.cuh): a K block's
// products from zero, which enter the sum of its position in the K chunk by one fma, and at the end
// the positions' sums one after the other. Registers have no room for the sums of eight positions.
// So the K blocks are taken position by position, two positions side by side, and their sums are
// added to a total in shared memory.
#pragma once
#include "cuda/linear/mid_stored_feed.cuh"
#include "cuda/linear/mid_stored_scales.cuh"

namespace photon::cuda::stream_linear::mid_stored {

// A group's sums of an M tile, as seen from a lane.
template <typename Size, Epilogue kEpilogue>
struct Multiplier {
  using Load = typename Size::Load;
  static constexpr int kSums = Size::kSums, kOwn = Size::kOwn, kInFlight = Size::kInFlight;
  static constexpr bool kTakesSums = Load::kExcess > 0;

  const Params& p;
  const Layout<Size>& at;
  unsigned char* shared;
  Barriers<Size> barriers;
  int m, share, warp, lane;  // m: M tile of the pass; warp: of the group
  int blocks;                // of the CTA's columns
  Place weights;             // of the own K block that comes next
  uint32_t x = 0;            // K blocks of x before its unit
  uint32_t turn = 0;         // parity: how often totals were added to
  float sums[kOwn][kSums];

  __device__ Multiplier(const Params& p, const CtaTiles& range, const Layout<Size>& at,
                        unsigned char* shared, int group)
      : p(p),
        at(at),
        shared(shared),
        barriers(shared + at.barriers),
        m(group / Size::kShares),
        share(group % Size::kShares),
        warp(static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        blocks(blocks_of(range)) {
    weights.advance(share * kOwn / kStageBlocks<Load>, p.stages);
  }

  // Of one pass over x. A group without an M tile lets stages pass.
  __device__ void run(const ScaleRows& rows, bool is_busy) {
#pragma unroll 1
    for (int position = 0; position < min(blocks, kKBlocks); position += Size::kUnit) {
      clear();
#pragma unroll 1
      for (int first = position; first < blocks; first += kKBlocks) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) add_block(sums[i], rows, first, i, is_busy);
        x += Size::kUnit;
      }
      add_to_total(position == 0);
    }
  }

  // What the lane has of eight tokens: as multiply_bf16() has it.
  __device__ float4 total(int token_tile) const { return *total_of(token_tile); }

 private:
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kOwn * kSums; ++i) sums[i / kSums][i % kSums] = 0.0f;
  }

  __device__ float4* total_of(int i) const {
    return reinterpret_cast<float4*>(shared + at.total + m * Size::kTotalBytes) +
           i * kWarpgroupThreads + warp * kWarpSize + lane;
  }

  // Of an own K block of the unit that begins with `first`.
  __device__ void add_block(float (&to)[kSums], const ScaleRows& rows, int first, int own,
                            bool is_busy) {
    const int of_unit = share * kOwn + own, stage = x % Size::kXStages + of_unit;
    if (is_busy) {
      BlockScales<Load> scales;
      scales.load(p.scales, rows, min(first + of_unit, blocks - 1));
      wait_barrier(&barriers.weights[weights.index], weights.parity);
      uint32_t w[Load::kMatrices][4];
      load_weights(w, of_unit);
      wait_barrier(&barriers.ready[stage], x / Size::kXStages % 2);
      multiply(to, w, scales, stage);
    } else {
      wait_barrier(&barriers.ready[stage], x / Size::kXStages % 2);
    }
    __syncwarp();
    if (lane == 0) arrive(&barriers.empty[stage]);
    // Where a stage holds both own K blocks, the second one leaves it.
    if (kOwn == 1) {
      weights.advance(Size::kUnitStages, p.stages);
    } else if ((own + 1) % kStageBlocks<Load> == 0) {
      weights.advance(1, p.stages);
    }
  }

  // The four matrices are a vector of columns of the first 8-row tile and of the second one, then
  // the next vector of both. A warp without a tile loads what lies behind those of the others.
  __device__ void load_weights(uint32_t (&w)[Load::kMatrices][4], int of_unit) const {
    const int matrix = lane / 8, row = lane % 8, tile = m * p.m_tile_tiles + warp;
    const int row_tile = is_swiglu<kEpilogue>(p) ? tile + matrix % 2 * p.pass_tiles * p.m_tile_tiles
                                                 : tile * kTileRowTiles + matrix % 2;
    const int offset = (row_tile * kRowTileRows + row) * kRowBytes + (matrix / 2 ^ row) * 16;
    const unsigned char* const stage = shared + at.ring + weights.index * p.stage_bytes;
    const int half = of_unit % kStageBlocks<Load> * (kRowBytes / 2);
#pragma unroll
    for (int i = 0; i < Load::kMatrices; ++i)
      load_matrices(w[i], stage + (offset ^ (half + i * 32)));
  }

  // Where a K block has several groups, it has a sum of their scaled products.
  __device__ void multiply(float (&to)[kSums], const uint32_t (&w)[Load::kMatrices][4],
                           const BlockScales<Load>& scales, int stage) const {
    if constexpr (Load::kGroups == 1) {
      add_group(to, w, scales, 0, stage);
    } else {
      float block[kSums] = {};
#pragma unroll
      for (int group = 0; group < Load::kGroups; ++group) add_group(block, w, scales, group, stage);
#pragma unroll
      for (int i = 0; i < kSums; ++i) to[i] += block[i];
      warpgroup_settle(to);
    }
  }

  // While a matrix instruction runs, the next one's weights are decoded.
  __device__ void add_group(float (&to)[kSums], const uint32_t (&w)[Load::kMatrices][4],
                            const BlockScales<Load>& scales, int group, int stage) const {
    constexpr int kEach = kDepths / Load::kGroups, kHalfBytes = Size::kXBytes / 2;
    const RowTileFragment tokens(shared + at.x + stage * Size::kXBytes);
    const float* const of_x = reinterpret_cast<const float*>(shared + at.of_x) +
                              (stage * Load::kGroups + group) * Size::kTokens + lane % 4 * 2;
    float products[kSums];
    if constexpr (kTakesSums) take_excess(products, scales, group, of_x);
    uint32_t a[kInFlight][4];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int depth = group * kEach + i;
      Load::decode(w, depth, a[i % kInFlight]);
      warpgroup_begin();
      multiply_tokens<Load::kIsF16>(products, a[i % kInFlight],
                                    tokens.after(depth / stream_linear::kDepths * kHalfBytes),
                                    depth % stream_linear::kDepths, kTakesSums || i > 0);
      warpgroup_commit();
      if (i + 1 < kEach) warpgroup_wait_but<kInFlight - 1>();
    }
    warpgroup_wait_but<0>();
    warpgroup_settle(products);
    add_times(to, products, {scales.of(p.scales, group, 0), scales.of(p.scales, group, 1)}, of_x);
  }

  // What the group's numbers are too large by, before their products are added. `of_x`: of the
  // lane's first token.
  __device__ static void take_excess(float (&from)[kSums], const BlockScales<Load>& scales,
                                     int group, const float* of_x) {
    float excess[2] = {};
    if constexpr (Load::kHasZeros) {
#pragma unroll
      for (int i = 0; i < 2; ++i) excess[i] = scales.excess(group, i);
    }
#pragma unroll
    for (int t = 0; t < Size::kTokenTiles; ++t) {
      const float2 pair = *reinterpret_cast<const float2*>(of_x + t * kTokenTile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = i % 2 == 0 ? pair.x : pair.y;
        from[4 * t + i] = Load::kHasZeros ? -excess[i / 2] * sum : sum;
      }
    }
  }

  // `scales`: of the lane's two rows.
  __device__ static void add_times(float (&to)[kSums], const float (&what)[kSums],
                                   const float (&scales)[2], const float* of_x) {
#pragma unroll
    for (int t = 0; t < Size::kTokenTiles; ++t) {
      float2 x_scales = make_float2(1.0f, 1.0f);
      if constexpr (Load::kIsF16)
        x_scales = *reinterpret_cast<const float2*>(of_x + t * kTokenTile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = scales[i / 2] * (i % 2 == 0 ? x_scales.x : x_scales.y);
        to[4 * t + i] = fmaf(scale, what[4 * t + i], to[4 * t + i]);
      }
    }
  }

  // Adds the sums of the unit's positions; `begins` where these are the first ones. Groups that
  // share an M tile do so in turn.
  __device__ void add_to_total(bool begins) {
    constexpr int kShares = Size::kShares;
    if (kShares > 1)
      wait_barrier(&barriers.added[(share + kShares - 1) % kShares], share > 0 ? turn : turn ^ 1);
    const bool is_first = begins && share == 0;
#pragma unroll
    for (int t = 0; t < Size::kTokenTiles; ++t) {
      float4 v = is_first ? make_float4(sums[0][4 * t], sums[0][4 * t + 1], sums[0][4 * t + 2],
                                        sums[0][4 * t + 3])
                          : *total_of(t);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (i == 0 && is_first) continue;
        v = make_float4(v.x + sums[i][4 * t], v.y + sums[i][4 * t + 1], v.z + sums[i][4 * t + 2],
                        v.w + sums[i][4 * t + 3]);
      }
      *total_of(t) = v;
    }
    if (kShares > 1) {
      __syncwarp();
      if (lane == 0) arrive(&barriers.added[share]);
      turn ^= 1;
    }
  }
};

// The threads that multiply: pass by pass, from sums to outputs.
template <typename Size, Epilogue kEpilogue>
__device__ void multiply_and_finish(const Params& p, const CtaTiles& range, const Layout<Size>& at,
                                    unsigned char* shared, int group, int active) {
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  constexpr int kBarrier = 1;  // number of theirs
  Multiplier<Size, kEpilogue> multiplier(p, range, at, shared, group);
  const auto floats = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  Bf16* const old = reinterpret_cast<Bf16*>(shared + at.old);
  Output<kEpilogue> output{p,
                           range,
                           floats(at.squares),
                           old,
                           floats(at.peer),
                           multiplier.barriers.arrived,
                           Size::kTokens,
                           0};
  if (threadIdx.x == 0) output.expect_peer(active);
  const int tile = multiplier.m * p.m_tile_tiles + multiplier.warp, g = multiplier.lane / 4,
            last_row = (is_swiglu<kEpilogue>(p) ? 2 : 1) * p.n - 1, m_tiles = m_tiles_of(p, range);
  wait_for_earlier();
#pragma unroll 1
  for (Pass pass = pass_from(0, p.pass_tiles, m_tiles); pass.count > 0;
       pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, m_tiles)) {
    output.first_tile = pass.first * p.m_tile_tiles;
    const int tiles = min(pass.count * p.m_tile_tiles, range.tiles - output.first_tile);
    if constexpr (kAdds) {
      if (pass.first > 0) sync_threads(kBarrier, Size::kMultipliers);  // what old held is read
      output.fetch_old(old, tiles, active, Size::kMultipliers);
    }
    const TileRows rows = tile_rows<kEpilogue>(p, range, output.first_tile + tile);
    multiplier.run(ScaleRows(p.scales, min(rows.first + g, last_row),
                             min(rows.second + g, last_row), range.column / kBlockColumns),
                   multiplier.m < pass.count);
    if constexpr (kAdds) {
      wait_copies<0>();
      sync_threads(kBarrier, Size::kMultipliers);
    }
    if (multiplier.share + 1 < Size::kShares || multiplier.warp >= p.m_tile_tiles || tile >= tiles)
      continue;
#pragma unroll 1
    for (int t = 0; t < Size::kTokenTiles; ++t) {
      const float4 v = multiplier.total(t);
      const int token = t * kTokenTile + multiplier.lane % 4 * 2;
      if (token < active) output.take(tile, g, token, output.scale(token), v.x, v.z);
      if (token + 1 < active) output.take(tile, g, token + 1, output.scale(token + 1), v.y, v.w);
    }
  }
}

template <typename Size, Epilogue kEpilogue>
__device__ void run_block(const Params& p) {
  constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;
  let_next_start();
  const int counts = live_tokens(p);
  unsigned char* const shared = dynamic_shared();
  const CtaTiles range = cta_tiles<kEpilogue>(p);
  const Layout<Size> at(p.stages * p.stage_bytes, p.pass_tiles * p.m_tile_tiles,
                        is_split<kEpilogue>(p) ? p.most_tiles : 0, p.k, kNormalizes, !kNormalizes);
  if (threadIdx.x == 0) {
    prefetch_row_tile_map(p.weight[range.part]);
    prefetch_row_tile_map(p.tokens_map);
  }
  Barriers<Size>(shared + at.barriers).init(p.stages);
  __syncthreads();
  if (is_split<kEpilogue>(p)) {
    enter_cluster();
    meet_cluster();  // the neighbour has initialized `arrived` before anything is sent to it
  }
  const int active = min(counts, p.tokens);
  if (active <= 0 || range.tiles == 0) return wait_for_earlier();
  const int group = of_warp(threadIdx.x / kWarpgroupThreads);
  if (group == Size::kGroups) {
    shrink_registers<Size::kFeedRegisters>();
    Feeder<Size, kEpilogue>(p, range, shared, at).run();
  } else {
    grow_registers<Size::kSumRegisters>();
    multiply_and_finish<Size, kEpilogue>(p, range, at, shared, group, active);
  }
}

}  // namespace photon::cuda::stream_linear::mid_stored
