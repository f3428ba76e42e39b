// The Hopper linears for up to 8 tokens, and of weights of fewer bits for up to 16.
//
// Tensor copies bring the weights into a ring in shared memory. A stage of the ring is a tile of 16
// rows by 512 columns of bfloat16, or half a tile where no CTA has more; of fewer bits it has 1024
// columns, of int4 at few tokens of two tiles. The CTA's eight warps request the stages by turns.
// Weights depend on no other kernel, so that with a programmatic launch the ring is full when the
// kernel before ends. Each warp multiplies one K block of every tile: the weights are the left
// operand of the matrix instruction, the tokens the right one. At the end the sums of the eight
// warps are added up in shared memory.
//
// A chain runs several of these kernels one after the other, each for a few microseconds. So their
// code has to stay in the instruction cache together, and every dependent instruction between the
// wait and the last store costs time. This is why loops are not unrolled without need, why the host
// computes what it can, and why addresses are computed before the wait.
#pragma once
#include "cuda/linear/narrow_finish.cuh"
#include "cuda/linear/narrow_scales.cuh"
#include "cuda/linear/narrow_x.cuh"

namespace photon::cuda::stream_linear {

namespace narrow {

// A warp's sums over its K blocks, as seen from a lane. All addresses are computed before the wait.
template <typename Size, bool kNormalizes>
struct Multiplier {
  using Load = typename Size::Load;
  static constexpr bool kReloads = Load::kIsScaled;  // x is loaded ahead for the next pass, too
  static constexpr int kTiles = Size::kTiles, kAhead = Size::kAhead,
                       kTokenTiles = Size::kTokenTiles, kStageTiles = Load::kStageTiles;
  using XChunk = XBlock<Load, kTokenTiles>;  // the warp's K block of a K chunk
  static constexpr int kVectors = XChunk::kVectors;

  const typename Load::Params& p;
  const Ring& ring;
  const unsigned char* scales;  // of the first stage
  uint32_t zero;
  int warp, group, thread;      // group = lane / 4: token and row; thread = lane % 4: columns
  bool is_active[kTokenTiles];  // there is such a token
  const Bf16* x_at;             // the lane's first columns, in its first token
  const unsigned char* gain;    // of those columns, in shared memory
  int k_chunks, columns;        // of the CTA's range; from the warp's first K block to its end
  int offset[Load::kMatrices];  // of what the lane points load_matrices() to, in a tile
  int scale_at, zero_at;        // of the lane's first row in a tile's scales and zero points
  Stage stage;
  int next = 0;  // K chunk of x that is loaded next
  float sums[kTiles][kTokenTiles][4];
  // Products of a stage. With several groups a K block (kIsPacked) they are pending: add_blocks()
  // adds them to the sums of tile block_tile and the next, behind the loads of the stage that
  // follows.
  float blocks[kStageTiles][kTokenTiles][4];
  int block_tile = 0;
  XPreparer<Load, kTokenTiles, kNormalizes> prepared;

  __device__ Multiplier(const typename Load::Params& p, const CtaTiles& range, const Ring& ring,
                        const unsigned char* scales, const unsigned char* gains, int active)
      : p(p),
        ring(ring),
        scales(scales),
        zero(p.zero),
        warp(computed_now(threadIdx.x / kWarpSize)),
        group(computed_now(threadIdx.x % kWarpSize / 4)),
        thread(computed_now(threadIdx.x % 4)),
        k_chunks(k_chunks_of<Size>(range)) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) is_active[t] = group + t * kTokenTile < active;
    const int column = range.column + warp * Load::kColumns + thread * kLaneColumns;
    x_at = computed_now(p.x + static_cast<int64_t>(group) * p.x_stride + column);
    gain = gains + computed_now(column * 2);
    columns = computed_now(range.k - warp * Load::kColumns);
    // The four matrices are a vector of columns of the first 8-row tile and of the second one, then
    // the next vector of both. Where there is no second 8-row tile, the first one is read twice.
    const int matrix = threadIdx.x % kWarpSize / 8, row = threadIdx.x % 8,
              row_tile = p.stage_bytes > Size::kRowTileBytes ? matrix % 2 : 0;
#pragma unroll
    for (int i = 0; i < Load::kMatrices; ++i)
      offset[i] = pinned(row_tile * Size::kRowTileBytes + Load::offset(warp, matrix, row, i));
    if constexpr (Load::kIsScaled)
      scale_at = pinned(group * Load::kScalePitch + Load::scale_offset(p.stored, warp));
    if constexpr (Load::kZeros != Zeros::kNone)
      zero_at = pinned(kTileRows * Load::kScalePitch + group * Load::kZeroPitch +
                       Load::zero_offset(p.stored, warp));
  }

  // The first K chunks of x are on their way when this returns.
  __device__ void start(XChunk (&x)[kAhead]) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(x[a], kReloads ? next_chunk() : a);
  }

  // The sums of one pass over x.
  template <typename Filler>
  __device__ void run(XChunk (&x)[kAhead], const Pass& pass, Filler& filler, const Stamps& stamps) {
    prepared.clear();
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        sums[m][t][0] = sums[m][t][1] = sums[m][t][2] = sums[m][t][3] = 0.0f;
    }
    if constexpr (Load::kIsPacked) clear_blocks();
#pragma unroll 1
    for (int k_chunk = 0; k_chunk < k_chunks; ++k_chunk) {
      add_k_chunk(x[0], k_chunk, pass, filler, stamps);
#pragma unroll
      for (int a = 1; a < kAhead; ++a) x[a - 1] = x[a];
      load(x[kAhead - 1], kReloads ? next_chunk() : k_chunk + kAhead);
    }
    if constexpr (Load::kIsPacked) add_blocks<0, kTiles>();
  }

 private:
  // Behind the last K chunk comes the first one of the next pass.
  __device__ int next_chunk() {
    const int k_chunk = next;
    if (++next == k_chunks) next = 0;
    return k_chunk;
  }

  // Where registers are short the compiler would compute addresses again in each stage.
  __device__ static int pinned(int value) {
    return Load::kIsScaled ? computed_once(value) : computed_now(value);
  }

  __device__ void load(XChunk& x, int k_chunk) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const bool is_inside =
          k_chunk * Size::kChunk < columns && is_active[t];  // a K block is inside or outside as a
                                                             // whole
      const Bf16* from =
          x_at + k_chunk * Size::kChunk + static_cast<int64_t>(t * kTokenTile) * p.x_stride;
#pragma unroll
      for (int h = 0; h < kVectors; ++h) x.v[t][h] = load_x(is_inside, from + h * 32);
    }
  }

  // The stages of a K chunk, one after the other. With several groups a K block this is a loop with
  // one copy of the code: unrolled, the kernels of a layer do not fit the instruction cache.
  template <typename Filler>
  __device__ void add_k_chunk(XChunk& x, int k_chunk, const Pass& pass, Filler& filler,
                              const Stamps& stamps) {
    if constexpr (Load::kIsPacked) {
#pragma unroll 1
      for (int m = 0; m < pass.count; m += kStageTiles)
        add_stage(x, k_chunk, m, pass, filler, stamps);
    } else {
#pragma unroll
      for (int m = 0; m < kTiles; m += kStageTiles) {
        if (m >= pass.count) break;
        add_stage(x, k_chunk, m, pass, filler, stamps);
      }
    }
  }

  // That of tile m of the pass and those that follow it there.
  template <typename Filler>
  __device__ void add_stage(XChunk& x, int k_chunk, int m, const Pass& pass, Filler& filler,
                            const Stamps& stamps) {
    wait_barrier(&ring.full[stage.index], stage.parity);
    uint32_t w[kStageTiles][Load::kMatrices][4];
    TileScales<Load> tile_scales[kStageTiles];
    uint32_t loaded = 0;
#pragma unroll
    for (int s = 0; s < kStageTiles; ++s) {
#pragma unroll
      for (int i = 0; i < Load::kMatrices; ++i) {
        load_matrices(w[s][i], ring.stage(stage.index) + s * Size::kTileBytes + offset[i]);
        loaded |= w[s][i][3];
      }
      if constexpr (Load::kIsScaled) {
        const unsigned char* const tile =
            scales + (stage.index * kStageTiles + s) * Size::kScaleBytes;
        loaded |= tile_scales[s].read(p.stored, tile + scale_at, tile + zero_at);
      }
    }
    if constexpr (Load::kIsPacked)
      add_blocks<0, kTiles>();  // of the stage before: prepare() replaces the scales of x
    if (m == 0)
      prepared.prepare(
          x, gain + k_chunk * Size::kChunk * 2,
          k_chunk * Size::kChunk <
              columns);  // waits for x, while the first weights are on their way to registers
    if (m == 0 && k_chunk == 0 && pass.first == 0) stamps.at(Point::kLoaded);
    __syncwarp();  // all lanes have read the stage
    if (threadIdx.x % kWarpSize == 0) arrive(&ring.empty[stage.index], loaded & zero);
    filler.refill(stage);
    stage.advance(ring.stages);
    if constexpr (Load::kIsPacked) {
      block_tile = m;
      multiply_blocks(w, tile_scales, x);
    } else if constexpr (Load::kIsScaled) {
      add_scaled(m, w, tile_scales, x);
    } else {
#pragma unroll
      for (int d = 0; d < 2 * kVectors; ++d) add_products(sums[m], w[0], x, d);
    }
  }

  // Of one instruction's columns, for all tokens.
  __device__ static void add_products(float (&to)[kTokenTiles][4],
                                      const uint32_t (&w)[Load::kMatrices][4], const XChunk& x,
                                      int depth) {
    uint32_t a[4];
    Load::decode(w, depth, a);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const uint4 v = x.v[t][depth / 2];
      if (depth % 2 == 0) Load::multiply(to[t], a, {v.x, v.y});
      if (depth % 2 == 1) Load::multiply(to[t], a, {v.z, v.w});
    }
  }

  __device__ void clear_blocks() {
#pragma unroll
    for (int s = 0; s < kStageTiles; ++s) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        blocks[s][t][0] = blocks[s][t][1] = blocks[s][t][2] = blocks[s][t][3] = 0.0f;
    }
  }

  // Sets `blocks` to the sum of a K block's groups, each scaled by one fma.
  __device__ void multiply_blocks(const uint32_t (&w)[kStageTiles][Load::kMatrices][4],
                                  const TileScales<Load> (&tile_scales)[kStageTiles],
                                  const XChunk& x) {
    clear_blocks();
#pragma unroll
    for (int i = 0; i < Load::kGroups; ++i) {
      float products[kStageTiles][kTokenTiles][4] = {};
      add_group(products, i, w, tile_scales, x);
#pragma unroll
      for (int s = 0; s < kStageTiles; ++s) add_times(blocks[s], products[s], tile_scales[s], i);
    }
  }

  // Adds `blocks` to the sums of tile `block_tile` and those behind it in its stage. Registers
  // cannot be indexed at run time, so the tile is looked for among kFirst .. kEnd - 1, by halves. A
  // tile that the stage lacks adds garbage to sums that nobody reads.
  template <int kFirst, int kEnd>
  __device__ void add_blocks() {
    if constexpr (kEnd - kFirst == kStageTiles) {
#pragma unroll
      for (int s = 0; s < kStageTiles; ++s) add_block(sums[kFirst + s], blocks[s], {1.0f, 1.0f});
    } else {
      constexpr int kMiddle = kFirst + (kEnd - kFirst) / 2 / kStageTiles * kStageTiles;
      if (block_tile < kMiddle) return add_blocks<kFirst, kMiddle>();
      add_blocks<kMiddle, kEnd>();
    }
  }

  // Of one group a K block: to the sums of tile m and those that follow it in its stage.
  __device__ void add_scaled(int m, const uint32_t (&w)[kStageTiles][Load::kMatrices][4],
                             const TileScales<Load> (&tile_scales)[kStageTiles], const XChunk& x) {
    float products[kStageTiles][kTokenTiles][4] = {};
    add_group(products, 0, w, tile_scales, x);
#pragma unroll
    for (int s = 0; s < kStageTiles; ++s)
      add_block(sums[m + s], products[s],
                {tile_scales[s].of(p.stored, 0, 0), tile_scales[s].of(p.stored, 0, 1)});
  }

  // By one fma with the scale of its row and that of x, where that has one.
  __device__ void add_block(float (&to)[kTokenTiles][4], const float (&what)[kTokenTiles][4],
                            const float (&of_rows)[2]) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float scale = of_rows[j / 2];
        if constexpr (Load::kIsF16) scale *= prepared.scales[t][j % 2];
        to[t][j] = fmaf(scale, what[t][j], to[t][j]);
      }
    }
  }

  // The products of a group of columns, tiles side by side, less what their numbers are too large
  // by.
  __device__ void add_group(float (&to)[kStageTiles][kTokenTiles][4], int i,
                            const uint32_t (&w)[kStageTiles][Load::kMatrices][4],
                            const TileScales<Load> (&tile_scales)[kStageTiles],
                            const XChunk& x) const {
    constexpr int kEach = 2 * kVectors / Load::kGroups;
    if constexpr (Load::kTakesSums) {
#pragma unroll
      for (int s = 0; s < kStageTiles; ++s) take_excess(to[s], i, tile_scales[s]);
    }
#pragma unroll
    for (int d = i * kEach; d < (i + 1) * kEach; ++d) {
#pragma unroll
      for (int s = 0; s < kStageTiles; ++s) add_products(to[s], w[s], x, d);
    }
  }

  // Before the products are added.
  __device__ void take_excess(float (&from)[kTokenTiles][4], int i,
                              const TileScales<Load>& tile_scales) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = prepared.sums[i][t][j % 2];
        if constexpr (Load::kZeros == Zeros::kPoints) {
          from[t][j] = -(kWideOnes + tile_scales.point(i, j / 2)) * sum;
        } else {
          from[t][j] = sum;
        }
      }
    }
  }

  // Adds the products of group `i`, times its scales.
  __device__ void add_times(float (&to)[kTokenTiles][4], const float (&what)[kTokenTiles][4],
                            const TileScales<Load>& tile_scales, int i) const {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const float scale = tile_scales.of(p.stored, i, high);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int j = 2 * high; j < 2 * high + 2; ++j) to[t][j] = fmaf(scale, what[t][j], to[t][j]);
      }
    }
    if constexpr (Load::kZeros == Zeros::kOffsets) add_offsets(to, tile_scales, i);
  }

  // Of group `i`, behind its products.
  __device__ void add_offsets(float (&to)[kTokenTiles][4], const TileScales<Load>& tile_scales,
                              int i) const {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const float offset = tile_scales.offset(i, high);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& sum = to[t][high * 2 + j];
          sum = fmaf(offset, prepared.sums[i][t][j], sum);
        }
      }
    }
  }
};

// What has to be done before the first copy of a weight. The gains are on their way when this
// returns.
template <typename Size, Epilogue kEpilogue>
__device__ void begin_block(const Params& p, const Layout<Size>& at, const Ring& ring,
                            Barrier* arrived, const CtaTiles& range) {
  constexpr int kFillers = 1 + (Size::Load::kIsScaled ? kWarpSize : 0);  // lanes, and the elected
  const int i = threadIdx.x;
  if (i == 0) prefetch_row_tile_map(p.weight[range.part]);
  if (i < p.stages) {
    init_barrier(&ring.full[i], kFillers);
    init_barrier(&ring.empty[i], kWarps);
  }
  if (i == 0) init_barrier(arrived, 1);
  if (i < kWarpSize) fence_barriers();
  __syncthreads();
  if (is_split<kEpilogue>(p)) {
    enter_cluster();
    meet_cluster();  // the neighbour has initialized `arrived` before anything is sent to it
  }
  if constexpr (kEpilogue != Epilogue::kAdd) {
#pragma unroll 1
    for (int j = i; j < p.k / 8; j += kThreads)
      async_copy16(dynamic_shared() + at.gain + j * 16, p.gain + j * 8, true);
    commit_copies();
  }
}

template <typename Size, Epilogue kEpilogue>
__device__ void run_block(const typename Size::Load::Params& p) {
  constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;
  using Load = typename Size::Load;
  const Stamps stamps = stamps_of<kEpilogue>(p);
  let_next_start();
  // counts is read before the wait, as the weights are: if loads of x had to wait for it, they
  // would take twice as long. The kernel that writes it lets no other start.
  const int counts = live_tokens(p);
  unsigned char* shared = dynamic_shared();
  const CtaTiles range = cta_tiles<kEpilogue>(p);
  int scale_bytes = 0, partial_bytes = Size::kPartialBytes;
  if constexpr (Load::kIsScaled) partial_bytes = p.partial_bytes;
  if constexpr (Load::kIsScaled) scale_bytes = p.stages * Load::kStageTiles * Size::kScaleBytes;
  const Layout<Size> at(p.stages * p.stage_bytes, scale_bytes,
                        is_split<kEpilogue>(p) ? p.most_tiles : 0, p.k, kNormalizes, !kNormalizes,
                        partial_bytes);
  Barrier* const barriers = reinterpret_cast<Barrier*>(shared + at.barriers);
  Barrier* const arrived = barriers + 2 * kMaxStages;
  const Ring ring{shared + at.ring, barriers, barriers + kMaxStages, p.stages, p.stage_bytes};
  Filler<Size, kEpilogue> filler(p, range, ring, shared + at.scales);
  begin_block<Size, kEpilogue>(p, at, ring, arrived, range);

  // A step without live tokens reads no weights, and some CTAs have no rows. They wait all the
  // same, because the next kernel takes this one's end for the end of all kernels before it.
  const int active = min(counts, p.tokens);
  if (active <= 0 || range.tiles == 0) {
    wait_copies<0>();
    return wait_for_earlier();
  }
  filler.fill();
  const Finish<Size, kEpilogue> finish{p, at, shared, range.tiles, active, partial_bytes};
  Bf16* const old = finish.template place<Bf16>(at.old);
  Output<kEpilogue> output{p,
                           range,
                           finish.template place<const float>(at.squares),
                           old,
                           finish.template place<float>(at.peer),
                           arrived,
                           Size::kTokens,
                           0};
  if (threadIdx.x == 0) output.expect_peer(active);
  Multiplier<Size, kNormalizes> multiplier(p, range, ring, shared + at.scales, shared + at.gain,
                                           active);
  typename Multiplier<Size, kNormalizes>::XChunk x[Size::kAhead];
  wait_copies<0>();
  __syncthreads();  // all gains are there
  wait_for_earlier();
  multiplier.start(x);  // first of all: not even what the compiler computes ahead of the loop comes
                        // before it
  stamps.at(Point::kWaited);

  Pass pass = pass_from(0, p.pass_tiles, range.tiles);
#pragma unroll 1
  while (true) {
    output.first_tile = pass.first;
    if constexpr (!kNormalizes) {
      if (pass.first > 0) __syncthreads();  // what out held has been read
      output.fetch_old(old, pass.count, active, kThreads);
    }
    multiplier.run(x, pass, filler, stamps);
    stamps.at(Point::kSummed);
    finish.run(multiplier, pass, output);
    stamps.at(Point::kStored);
    pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, range.tiles);
    if (pass.count <= 0) return;
    if constexpr (!multiplier.kReloads) multiplier.start(x);
  }
}

}  // namespace narrow
}  // namespace photon::cuda::stream_linear
