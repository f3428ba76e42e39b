// The Hopper linears of weights of fewer bits for more tokens, up to 64: a weight is read once.
//
// The left operand of a warpgroup's matrix instruction is 64 rows of the weight, an M tile, in
// registers, where they are decoded as in the narrow linears; the right one is the tokens, in
// shared memory. Tensor copies bring the weights into a ring, and x into another, as a kernel
// before has prepared it (prepare_x.cuh). Four groups of warps multiply, each all M tiles of a pass
// by every fourth K block: a group waits for one instruction after the other, and others work then.
//
// Were rows alone dealt out to CTAs, each would read all of x. So a cluster of two has the same
// rows, and a CTA half of the columns. A pass over them ends with an exchange: of every second
// eight tokens a CTA gets the sums of all eight groups, adds them up, and writes outputs.
//
// The sums are those of the narrow linears, in their order (narrow_linear.cuh, narrow_load.cuh): a
// K block's products by themselves, which enter the sum of its position in the K chunk by one fma;
// at the end the sums of positions four apart, and these one after the other.
#pragma once
#include "cuda/linear/mid_stored_feed.cuh"
#include "cuda/linear/mid_stored_scales.cuh"

namespace photon::cuda::stream_linear::mid_stored {

// A group's sums, as seen from a lane.
template <typename Size>
struct Multiplier {
  using Load = typename Size::Load;
  static constexpr int kSums = Size::kSums, kHalves = Size::kHalves, kMTiles = Size::kMTiles;

  const Params& p;
  const CtaWork& work;
  const Barriers<Size>& barriers;
  unsigned char* shared;
  int x_at, of_x_at;  // in shared memory
  int group, lane;    // lane: of the warp
  int offset;         // of what the lane points load_matrices() to, in a stage
  Stage weights, x;   // of the group's rings
  float sums[kMTiles][kHalves][kSums];

  __device__ Multiplier(const Params& p, const CtaWork& work, const Layout<Size>& at,
                        const Barriers<Size>& barriers, unsigned char* shared, int group)
      : p(p),
        work(work),
        barriers(barriers),
        shared(shared),
        x_at(at.x),
        of_x_at(at.of_x),
        group(group),
        lane(static_cast<int>(threadIdx.x) % kWarpSize) {
    // The four matrices are a vector of columns of the first 8-row tile and of the second one, then
    // the next vector of both. A warp without a tile loads what lies behind those of the others.
    const int matrix = lane / 8, row = lane % 8,
              warp = static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps;
    const bool is_swiglu = stream_linear::is_swiglu<Size::kEpilogue>(p);
    const int tile_bytes = (is_swiglu ? 1 : kTileRowTiles) * kRowTileBytes,
              second = is_swiglu ? p.stage_bytes / 2 : kRowTileBytes;
    offset = computed_now(warp * tile_bytes + matrix % 2 * second + row * kRowBytes +
                          (matrix / 2 ^ row) * 16);
  }

  // Over the CTA's columns, in one copy of the code. `rows`: of each M tile. With two turns a CTA
  // has all eight positions of its part of the columns. A pass then has one M tile
  // (kMaxSplitRowTiles), so that `first` holds all of its sums.
  __device__ void run(const ScaleRows (&rows)[kMTiles]) {
    float first[kHalves * kSums];
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      clear_sums();
      add_turn(rows, turn);
      if (turn + 1 == work.turns) break;
#pragma unroll
      for (int i = 0; i < kHalves * kSums; ++i) first[i] = sums[0][i / kSums][i % kSums];
    }
    if (work.turns == 1) return;
#pragma unroll
    for (int i = 0; i < kHalves * kSums; ++i)
      sums[0][i / kSums][i % kSums] = first[i] + sums[0][i / kSums][i % kSums];
  }

 private:
  __device__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < kMTiles * kHalves * kSums; ++i)
      sums[i / (kHalves * kSums)][i / kSums % kHalves][i % kSums] = 0.0f;
  }

  __device__ void add_turn(const ScaleRows (&rows)[kMTiles], int turn) {
#pragma unroll 1
    for (int first = work.first + turn * kGroups; first < work.blocks; first += kKBlocks) {
      const int count = min(work.blocks - first, kGroups);
      if (group < count) add_block(rows, first + group);
    }
  }

  __device__ void add_block(const ScaleRows (&rows)[kMTiles], int block) {
    constexpr int kStages = kXStages / kGroups;
    BlockScales<Load> scales[kMTiles];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) scales[m].load(p.scales, rows[m], block);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if (m >= p.pass_tiles) break;
      uint32_t a[kDepths][4];
      load(a);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int stage = group * kStages + x.index;
        if (m == 0) wait_barrier(&barriers.x[stage], x.parity);
        multiply(sums[m][half], a, scales[m], stage);
        if (m + 1 < p.pass_tiles) continue;  // one half where there are more M tiles
        arrive(&barriers.x_read[stage]);
        x.advance(kStages);
      }
    }
  }

  __device__ void release(Barrier* barrier, uint32_t after = 0) const {
    __syncwarp();
    if (lane == 0) arrive(barrier, after);
  }

  // The left operands of an M tile of the group's next K block.
  __device__ void load(uint32_t (&a)[kDepths][4]) {
    const int stage = group / kStageBlocks<Load> * p.stages + weights.index,
              half = group % kStageBlocks<Load> * (kRowBytes / 2);
    wait_barrier(&barriers.weights[stage], weights.parity);
    const unsigned char* const from = shared + stage * p.stage_bytes;
    uint32_t w[Load::kMatrices][4], loaded = 0;
#pragma unroll
    for (int i = 0; i < Load::kMatrices; ++i) {
      load_matrices(w[i], from + (offset ^ (half + i * 32)));
      loaded |= w[i][3];
    }
    release(&barriers.read[stage], loaded & p.zero);
    weights.advance(p.stages);
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) Load::decode(w, depth, a[depth]);
    warpgroup_settle(a);
  }

  // By 32 tokens. A K block of several groups of columns has a sum of their scaled products, which
  // is then scaled as x is, where that has a scale.
  __device__ void multiply(float (&to)[kSums], const uint32_t (&a)[kDepths][4],
                           const BlockScales<Load>& scales, int stage) const {
    if constexpr (Load::kGroups == 1) {
      add_group(to, a, scales, 0, stage);
    } else {
      float all[kSums] = {};
#pragma unroll
      for (int i = 0; i < Load::kGroups; ++i) add_group(all, a, scales, i, stage);
      add_block_sums(to, all, stage);
    }
  }

  // What comes with x in the stage, from the lane's first token on, of group `i`.
  __device__ const float* of_x(int stage, int i) const {
    return reinterpret_cast<const float*>(shared + of_x_at) +
           (stage * Load::kXRows + (Load::kXRows == 1 ? 0 : i)) * kTokensAtOnce + lane % 4 * 2;
  }

  __device__ void add_block_sums(float (&to)[kSums], const float (&all)[kSums], int stage) const {
#pragma unroll
    for (int t = 0; t < kSums / 4; ++t) {
      float2 of_tokens = make_float2(1.0f, 1.0f);
      if constexpr (Load::kIsF16)
        of_tokens = *reinterpret_cast<const float2*>(of_x(stage, 0) + t * kTokenTile);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float scale = j % 2 == 0 ? of_tokens.x : of_tokens.y;
        to[4 * t + j] = fmaf(scale, all[4 * t + j], to[4 * t + j]);
      }
    }
  }

  __device__ void add_group(float (&to)[kSums], const uint32_t (&a)[kDepths][4],
                            const BlockScales<Load>& scales, int i, int stage) const {
    constexpr int kEach = kDepths / Load::kGroups, kHalfBytes = Size::kXBytes / 2;
    const RowTileFragment tokens(shared + x_at + stage * Size::kXBytes);
    const float* const of_x = this->of_x(stage, i);
    float products[kSums];
    if constexpr (Load::kTakesSums) {
      take_excess(products, scales, i, of_x);
      warpgroup_settle(products);
    }
    warpgroup_begin();
#pragma unroll
    for (int depth = i * kEach; depth < (i + 1) * kEach; ++depth) {
      multiply_tokens<Load::kIsF16>(
          products, a[depth], tokens.after(depth / stream_linear::kDepths * kHalfBytes),
          depth % stream_linear::kDepths, Load::kTakesSums || depth > i * kEach);
    }
    warpgroup_commit();
    warpgroup_wait_but<0>();
    warpgroup_settle(products);
    add_times(to, products, scales, i, of_x);
  }

  // What the group's numbers are too large by, before their products are added. `of_x`: of the
  // lane's first token.
  __device__ static void take_excess(float (&from)[kSums], const BlockScales<Load>& scales, int i,
                                     const float* of_x) {
    float excess[2] = {};
    constexpr bool kHasPoints = Load::kZeros == narrow::Zeros::kPoints;
    if constexpr (kHasPoints) {
#pragma unroll
      for (int row = 0; row < 2; ++row) excess[row] = narrow::kWideOnes + scales.point(i, row);
    }
#pragma unroll
    for (int t = 0; t < kSums / 4; ++t) {
      const float2 pair = *reinterpret_cast<const float2*>(of_x + t * kTokenTile);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = j % 2 == 0 ? pair.x : pair.y;
        from[4 * t + j] = kHasPoints ? -excess[j / 2] * sum : sum;
      }
    }
  }

  __device__ void add_times(float (&to)[kSums], const float (&what)[kSums],
                            const BlockScales<Load>& scales, int i, const float* of_x) const {
    const float of_rows[] = {scales.of(p.scales, i, 0), scales.of(p.scales, i, 1)};
#pragma unroll
    for (int t = 0; t < kSums / 4; ++t) {
      float2 of_tokens = make_float2(1.0f, 1.0f);
      if constexpr (Load::kIsF16 && Load::kGroups == 1)
        of_tokens = *reinterpret_cast<const float2*>(of_x + t * kTokenTile);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float scale = of_rows[j / 2] * (j % 2 == 0 ? of_tokens.x : of_tokens.y);
        to[4 * t + j] = fmaf(scale, what[4 * t + j], to[4 * t + j]);
      }
    }
    if constexpr (Load::kZeros == narrow::Zeros::kOffsets) add_offsets(to, scales, i, of_x);
  }

  // Of group `i`, behind its products.
  __device__ void add_offsets(float (&to)[kSums], const BlockScales<Load>& scales, int i,
                              const float* of_x) const {
    float offsets[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) offsets[row] = scales.offset(i, row);
#pragma unroll
    for (int t = 0; t < kSums / 4; ++t) {
      const float2 pair = *reinterpret_cast<const float2*>(of_x + t * kTokenTile);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        to[4 * t + j] = fmaf(offsets[j / 2], j % 2 == 0 ? pair.x : pair.y, to[4 * t + j]);
    }
  }
};

// How the groups of a cluster share their sums of a pass. Eight tokens are one CTA's: lanes send it
// what they have of them. A thread there adds up what the lanes with one number have sent.
template <typename Size>
struct Exchange {
  static constexpr int kOwn = Size::kOwnTokenTiles, kMTileThreads = kOwn * kWarpgroupThreads;
  static_assert(Size::kMTiles * kMTileThreads == kMultipliers);

  const Barriers<Size>& barriers;
  float* sent;  // [M tile][group of the cluster][own eights][2][lanes of a group][2]
  const CtaWork& work;
  int m_tiles;  // of a pass
  uint32_t zero;
  uint32_t parity = 0;  // of exchanges

  __device__ void expect() const {
    if (threadIdx.x == 0)
      arrive_expecting(barriers.sent, m_tiles * Size::kSenders * Size::kSentBytes);
  }

  // What was sent before has been added.
  __device__ void send(const Multiplier<Size>& multiplier) const {
    const int sender = work.rank * kGroups + multiplier.group;
    wait_barrier(barriers.taken, parity ^ 1);
#pragma unroll
    for (int m = 0; m < Size::kMTiles; ++m) {
      if (m >= m_tiles) break;
#pragma unroll
      for (int t = 0; t < Size::kTokenTiles; ++t) {
        const float* const v =
            &multiplier.sums[m][t / (Size::kSums / 4)][t % (Size::kSums / 4) * 4];
        float* const to = place(m, sender, t / kCluster, threadIdx.x % kWarpgroupThreads);
        send_to_block(to, t % kCluster, v[0], v[1], barriers.sent);
        send_to_block(to + 2 * kWarpgroupThreads, t % kCluster, v[2], v[3], barriers.sent);
      }
    }
  }

  // The thread's M tile, eight of tokens of the CTA, and lane.
  __device__ int m() const { return static_cast<int>(threadIdx.x) / kMTileThreads; }
  __device__ int own() const {
    return static_cast<int>(threadIdx.x) % kMTileThreads / kWarpgroupThreads;
  }

  __device__ bool has_part() const { return m() < m_tiles; }

  __device__ void wait() {
    wait_barrier(barriers.sent, parity);
    parity ^= 1;
  }

  // In the order of the narrow linears.
  __device__ float4 add_up() const {
    float4 v[Size::kSenders];
#pragma unroll
    for (int i = 0; i < Size::kSenders; ++i) {
      const float* const from = place(m(), i, own(), threadIdx.x % kWarpgroupThreads);
      const float2 low = *reinterpret_cast<const float2*>(from),
                   high = *reinterpret_cast<const float2*>(from + 2 * kWarpgroupThreads);
      v[i] = make_float4(low.x, low.y, high.x, high.y);
    }
    // Where a CTA has all positions of its part, its groups have added those four apart.
    float4 parts[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float4 next = work.turns > 1 ? v[part * kGroups + i] : sum(v[i], v[i + kGroups]);
        parts[part] = i == 0 ? next : sum(parts[part], next);
      }
    }
    return work.turns > 1 ? sum(parts[0], parts[1]) : parts[0];
  }

  // The whole warp has read what was sent.
  __device__ void release(uint32_t loaded) const {
    __syncwarp();
    if (threadIdx.x % kWarpSize < kCluster)
      arrive_in_block(barriers.taken, threadIdx.x % kWarpSize, loaded & zero);
  }

 private:
  __device__ static float4 sum(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }

  __device__ float* place(int m, int sender, int own, int lane) const {
    return sent + ((m * Size::kSenders + sender) * kOwn + own) * 4 * kWarpgroupThreads + lane * 2;
  }
};

// The threads that multiply: pass by pass, from sums to outputs.
template <typename Size>
__device__ void multiply_and_finish(const Params& p, const CtaWork& work, const Layout<Size>& at,
                                    const Barriers<Size>& barriers, unsigned char* shared,
                                    int group, int active) {
  constexpr int kBarrier = 1;  // number of theirs
  Multiplier<Size> multiplier(p, work, at, barriers, shared, group);
  Exchange<Size> exchange{barriers, reinterpret_cast<float*>(shared + at.sent), work, p.pass_tiles,
                          p.zero};
  exchange.expect();
  Bf16* const old = reinterpret_cast<Bf16*>(shared + at.old);
  CtaTiles of_both = work.range;
  of_both.part = 0;
  Output<Size::kEpilogue> output{p,
                                 of_both,
                                 reinterpret_cast<float*>(shared + at.squares),
                                 old,
                                 nullptr,
                                 nullptr,
                                 Size::kTokens,
                                 0};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps, g = multiplier.lane / 4,
            pass_tiles = p.pass_tiles * p.m_tile_tiles,
            last_row = (is_swiglu<Size::kEpilogue>(p) ? 2 : 1) * p.n - 1;
  wait_for_earlier();
#pragma unroll 1
  for (int first = 0; first < work.range.tiles; first += pass_tiles) {
    output.first_tile = first;
    const int tiles = min(pass_tiles, work.range.tiles - first);
    if constexpr (Size::kAdds) {
      if (first > 0) sync_threads(kBarrier, kMultipliers);  // what old held is read
      output.fetch_old(old, tiles, active, kMultipliers);
    }
    ScaleRows scale_rows[Size::kMTiles];
#pragma unroll
    for (int m = 0; m < Size::kMTiles; ++m) {
      const TileRows rows =
          tile_rows<Size::kEpilogue>(p, work.range, first + m * p.m_tile_tiles + warp);
      scale_rows[m] = ScaleRows(p.scales, min(rows.first + g, last_row),
                                min(rows.second + g, last_row), work.range.column / kBlockColumns);
    }
    multiplier.run(scale_rows);
    exchange.send(multiplier);
    if constexpr (Size::kAdds) {
      wait_copies<0>();
      sync_threads(kBarrier, kMultipliers);
    } else {
      wait_barrier(barriers.squared, 0);
    }
    exchange.wait();
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (exchange.has_part()) v = exchange.add_up();
    if (first + pass_tiles < work.range.tiles) {
      exchange.expect();
      exchange.release(__float_as_uint(v.x) | __float_as_uint(v.w));
    }
    const int tile = exchange.m() * p.m_tile_tiles + warp;
    if (!exchange.has_part() || warp >= p.m_tile_tiles || tile >= tiles) continue;
    const int token =
        (exchange.own() * kCluster + work.rank) * kTokenTile + multiplier.lane % 4 * 2;
    if (token < active) output.finish(tile, g, token, output.scale(token), v.x, v.z);
    if (token + 1 < active) output.finish(tile, g, token + 1, output.scale(token + 1), v.y, v.w);
  }
}

// The threads that copy: a warp weights, another one x.
template <typename Size>
__device__ void copy(const Params& p, const CtaWork& work, const Layout<Size>& at,
                     const Barriers<Size>& barriers, unsigned char* shared) {
  const int warp = of_warp(static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps);
  if (warp == 0) copy_weights<Size>(p, work, shared + at.ring, barriers);
  wait_for_earlier();
  if (warp != 1) return;
  fence_async_global();  // x is read by copies
  copy_x<Size>(p, work, at, shared, barriers);
}

template <typename Size>
__device__ void run_block(const Params& p) {
  let_next_start();
  const int counts = live_tokens(p);
  unsigned char* const shared = dynamic_shared();
  const CtaWork work = CtaWork::of<Size::kEpilogue>(p);
  const Layout<Size> at(p.stages * p.stage_bytes * Size::kRings, p.pass_tiles,
                        p.pass_tiles * p.m_tile_tiles);
  const Barriers<Size> barriers(shared + at.barriers);
  if (threadIdx.x == 0) {
    prefetch_row_tile_map(p.weight[work.range.part]);
    prefetch_row_tile_map(p.tokens_map);
  }
  barriers.init(p.stages);
  __syncthreads();
  enter_cluster();
  meet_cluster();  // the other CTA has initialized its barriers before anything is sent to it
  const int active = min(counts, p.tokens);
  if (active <= 0 || work.range.tiles == 0) return wait_for_earlier();
  const int group = of_warp(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
  if (group < kGroups) {
    grow_registers<kSumRegisters>();
    multiply_and_finish<Size>(p, work, at, barriers, shared, group, active);
  } else {
    shrink_registers<kCopyingRegisters>();
    copy<Size>(p, work, at, barriers, shared);
  }
  __syncwarp();
  leave_cluster();
  meet_cluster();  // nobody sends to a CTA that has ended
}

}  // namespace photon::cuda::stream_linear::mid_stored
