// The decode linears as one stream of weights, for Hopper: norm_linear, linear_residual and norm_swiglu in bfloat16, for up to 64 lines.
//
// A block owns a run of weight rows and takes them in tiles of 16 rows by 512 columns, which bulk copies bring into a ring in shared
// memory; its eight warps request them by turns. They need nothing of the kernel before, so with a programmatic launch the ring is full
// when that one ends. Each warp multiplies the same 64 of the 512 columns of every tile, with the weights as the left operand of the matrix
// instruction and up to eight lines as the right one. At the end the eight partial sums meet in shared memory. Where the rows do not divide
// well among the multiprocessors, a cluster of blocks shares them and splits the columns.
//
// Which columns a warp adds, and in which order sums meet, depends on the weight's shape and on the device, never on the number of lines;
// and a line is a column of its own in every instruction. So a line has the same bits alone and in any batch.
#pragma once
#include "cuda/bf16.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda::stream_linear {

enum class Epilogue { kStore, kResidual, kSwiglu };

struct Params {
  Bf16* out;           // [lines, n]; kResidual: read, added to and written
  const Bf16* x;       // [lines, k]
  const Bf16* gain;    // [k]: x is normalized by its root mean square and multiplied by this; null: x is taken as it is
  const Bf16* weight;  // [n, k]; kSwiglu: [2n, k], gate rows, then up rows
  const Bf16* bias;    // a value per row of the weight, or null
  const int32_t* extent;
  int64_t out_stride, x_stride, weight_stride;
  int lines, n, k;
  float eps;
  bool early;     // the launch is programmatic
  int split;      // blocks of a cluster, which share rows and split the columns
  int stages;     // tiles that the ring holds
  uint32_t zero;  // 0; see arrive()
};

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlock = 32;         // columns whose weights feed two matrix instructions: 16 bytes a lane and row
constexpr int kBlocksPerWarp = 2;  // of a chunk
constexpr int kChunk = kWarps * kBlocksPerWarp * kBlock;
constexpr int kPanel = 8;  // rows; the grain in which blocks share them
constexpr int kTileRows = 16;
constexpr int kRowPitch = kChunk * 2 + 64;  // bytes; the 64 spread a quarter warp's 16-byte loads over all banks
constexpr int kStageBytes = kTileRows * kRowPitch;
constexpr int kLineTile = 8;       // lines of one matrix instruction
constexpr int kPartialPitch = 20;  // floats per line of a partial tile: 16 rows, and 4 that keep the writers' banks apart
constexpr int kPartialBytes = kWarps * kLineTile * kPartialPitch * 4 * 4;  // four tiles of eight lines
constexpr int kMaxStages = 11;

template <Epilogue kEpilogue>
constexpr int kTilePanels = kEpilogue == Epilogue::kSwiglu ? 1 : 2;  // a SwiGLU tile is a panel of gate rows and the same one of up rows

// How many lines and tiles a kernel holds in registers, and how many blocks of it a multiprocessor is to hold.
template <int kLineTiles_, int kTiles_, int kAhead_, int kResidents_>
struct Size {
  static constexpr int kLineTiles = kLineTiles_;
  static constexpr int kTiles = kTiles_;          // tiles of 16 rows that one pass over x serves
  static constexpr int kAhead = kAhead_;          // chunks of x on their way
  static constexpr int kResidents = kResidents_;  // two, where registers allow: the next kernel's ring fills while this one works
  static constexpr int kLines = kLineTiles * kLineTile;
};

// Where things lie in a block's shared memory, in bytes from its start; the host sizes the launch with it.
struct SharedLayout {
  int gain, squares, scale, residual, own, peers, partial, extent, barriers, ring;

  __host__ __device__ SharedLayout(int lines, int tiles, int k, bool normalizes, bool adds, int split) {
    const int outputs = tiles * kTileRows * lines * 4;
    gain = 0;
    squares = gain + (normalizes ? round_up(k * 2) : 0);
    scale = squares + kWarps * lines * 4;
    residual = scale + lines * 4;
    own = residual + (adds ? tiles * kTileRows * lines * 2 : 0);
    peers = own + (split > 1 ? outputs : 0);
    partial = peers + (split - 1) * outputs;
    extent = partial + kPartialBytes;
    barriers = extent + 16;
    ring = round_up(barriers + 2 * kMaxStages * static_cast<int>(sizeof(Barrier)));
  }

  static constexpr __host__ __device__ int round_up(int bytes) { return (bytes + 127) / 128 * 128; }
};

// The part of the work that a block does: panels [first_panel, end_panel) of the rows, chunks [first_chunk, end_chunk) of the columns.
struct Share {
  int first_panel, end_panel, first_chunk, end_chunk;
};

__device__ inline Share block_share(const Params& p) {
  const int64_t panels = ceil_div(p.n, kPanel), chunks = ceil_div(p.k, kChunk);
  const int64_t group = blockIdx.x / p.split, groups = gridDim.x / p.split, rank = blockIdx.x % p.split;
  return {static_cast<int>(group * panels / groups), static_cast<int>((group + 1) * panels / groups),
          static_cast<int>(rank * chunks / p.split), static_cast<int>((rank + 1) * chunks / p.split)};
}

// A run of tiles that is multiplied in one pass over x, in tiles of the block's share.
struct Pass {
  int first_tile, tiles;
};

template <typename Size, Epilogue kEpilogue>
struct Passes {
  int tiles, count;

  __device__ explicit Passes(const Share& share)
      : tiles((share.end_panel - share.first_panel + kTilePanels<kEpilogue> - 1) / kTilePanels<kEpilogue>),
        count((tiles + Size::kTiles - 1) / Size::kTiles) {}

  __device__ Pass operator[](int i) const {
    const int first = tiles * i / count;
    return {first, tiles * (i + 1) / count - first};
  }
};

// The output (a column of out) that row r of a tile computes, or -1 where the tile reaches past the share or the weight.
template <Epilogue kEpilogue>
__device__ inline int output_of(const Params& p, const Share& share, int tile, int r) {
  const int panel = share.first_panel + tile * kTilePanels<kEpilogue> + (kEpilogue == Epilogue::kSwiglu ? 0 : r / kPanel);
  const int output = panel * kPanel + r % kPanel;
  return panel < share.end_panel && output < p.n ? output : -1;
}

// --- the ring ------------------------------------------------------------------------------------------------------------------------

struct Ring {
  unsigned char* tiles;
  Barrier* full;   // by stage: its tile has landed
  Barrier* empty;  // by stage: all warps have read its tile
  int stages;
};

// A place in the ring, and how often it has gone round.
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance(const Ring& ring) {
    if (++index == ring.stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Fills the ring with the tiles of a share in the order in which they are multiplied. All warps count along, and take turns copying.
template <typename Size, Epilogue kEpilogue>
struct Filler {
  const Params& p;
  const Share& share;
  const Ring& ring;
  Passes<Size, kEpilogue> passes;
  int warp, lane;
  uint64_t policy;
  Stage stage;
  Pass pass;
  int index = 0, chunk, tile = 0, turn = 0;

  __device__ Filler(const Params& p, const Share& share, const Ring& ring)
      : p(p),
        share(share),
        ring(ring),
        passes(share),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        policy(evict_first()),
        pass(passes.count > 0 ? passes[0] : Pass{0, 0}),
        chunk(share.first_chunk) {}

  // Before the first tile is read: one stage stays free, that of the tile which would have been read last.
  __device__ void fill() {
    for (int i = 0; i + 1 < ring.stages; ++i) fill_next();
  }

  // Requests the next tile, if there is one more, as soon as its stage has been read.
  __device__ void fill_next() {
    if (index >= passes.count) return;
    if (turn == warp) copy();
    turn = (turn + 1) % kWarps;
    stage.advance(ring);
    if (++tile < pass.tiles) return;
    tile = 0;
    if (++chunk < share.end_chunk) return;
    chunk = share.first_chunk;
    if (++index < passes.count) pass = passes[index];
  }

 private:
  // Lane r copies row r of the tile.
  __device__ void copy() const {
    const int left = p.k - chunk * kChunk;
    const uint32_t bytes = 2 * (left < kChunk ? left : kChunk);
    const int output = lane < kTileRows ? output_of<kEpilogue>(p, share, pass.first_tile + tile, lane) : -1;
    const int row = output + (kEpilogue == Epilogue::kSwiglu && lane >= kPanel ? p.n : 0);
    const uint32_t rows = __popc(__ballot_sync(kFullWarp, output >= 0));
    wait_barrier(&ring.empty[stage.index], stage.parity ^ 1);
    if (lane == 0) arrive_expecting(&ring.full[stage.index], rows * bytes);
    __syncwarp();
    if (output < 0) return;
    bulk_copy(ring.tiles + stage.index * kStageBytes + lane * kRowPitch,
              p.weight + row * p.weight_stride + static_cast<int64_t>(chunk) * kChunk, bytes, &ring.full[stage.index], policy);
  }
};

// --- products ------------------------------------------------------------------------------------------------------------------------

// x * gain, rounded; the squares of x are added to `squares`.
__device__ inline uint32_t times_gain(uint32_t x, uint32_t gain, float& squares) {
  const float low = low_bf16(x), high = high_bf16(x);
  squares = fmaf(high, high, fmaf(low, low, squares));
  return pack_bf16(low * low_bf16(gain), high * high_bf16(gain));
}

// What a lane holds of one chunk of x: with g = lane / 4 and t = lane % 4, of line 8i + g the columns 8t .. 8t + 7 of each block.
template <typename Size>
struct XChunk {
  uint4 v[kBlocksPerWarp][Size::kLineTiles];
};

// A warp's sums over its columns, as seen from a lane.
template <typename Size, bool kNormalizes>
struct Multiplier {
  static constexpr int kLineTiles = Size::kLineTiles, kTiles = Size::kTiles;

  const Params& p;
  const Ring& ring;
  const unsigned char* gain;  // in shared memory
  int warp, group, thread;    // group = lane / 4: line and row; thread = lane % 4: columns
  int active;                 // lines
  Stage stage;
  float sums[kTiles][kLineTiles][4];
  float squares[kLineTiles];

  __device__ Multiplier(const Params& p, const Ring& ring, const unsigned char* gain, int active)
      : p(p),
        ring(ring),
        gain(gain),
        warp(threadIdx.x / kWarpSize),
        group(threadIdx.x % kWarpSize / 4),
        thread(threadIdx.x % 4),
        active(active) {}

  // The sums of one pass over x.
  template <typename Filler>
  __device__ void run(const Share& share, const Pass& pass, Filler& filler) {
    clear();
    XChunk<Size> x[Size::kAhead];
#pragma unroll
    for (int a = 0; a < Size::kAhead; ++a) {
      if (share.first_chunk + a < share.end_chunk) load(x[a], share.first_chunk + a);
    }
    for (int first = share.first_chunk; first < share.end_chunk; first += Size::kAhead) {
#pragma unroll
      for (int a = 0; a < Size::kAhead; ++a) {
        const int chunk = first + a;
        if (chunk < share.end_chunk) {
          if constexpr (kNormalizes) normalize(x[a], chunk);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            if (m < pass.tiles) add_tile(x[a], chunk, sums[m], filler);
          }
          if (chunk + Size::kAhead < share.end_chunk) load(x[a], chunk + Size::kAhead);
        }
      }
    }
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      squares[n] = 0.0f;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[m][n][j] = 0.0f;
      }
    }
  }

  // The first of the lane's eight columns in a block.
  __device__ int column(int chunk, int block) const { return chunk * kChunk + (warp * kBlocksPerWarp + block) * kBlock + thread * 8; }

  __device__ void load(XChunk<Size>& x, int chunk) const {
#pragma unroll
    for (int b = 0; b < kBlocksPerWarp; ++b) {
      const int k = column(chunk, b);
#pragma unroll
      for (int n = 0; n < kLineTiles; ++n) {
        const int line = n * kLineTile + group;
        x.v[b][n] = make_uint4(0, 0, 0, 0);
        if (line < active && k < p.k) x.v[b][n] = load_fresh(reinterpret_cast<const uint4*>(p.x + line * p.x_stride + k));
      }
    }
  }

  __device__ void normalize(XChunk<Size>& x, int chunk) {
#pragma unroll
    for (int b = 0; b < kBlocksPerWarp; ++b) {
      const int k = column(chunk, b);
      const uint4 gains = k < p.k ? *reinterpret_cast<const uint4*>(gain + 2 * k) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < kLineTiles; ++n) {
        uint4& v = x.v[b][n];
        v = make_uint4(times_gain(v.x, gains.x, squares[n]), times_gain(v.y, gains.y, squares[n]), times_gain(v.z, gains.z, squares[n]),
                       times_gain(v.w, gains.w, squares[n]));
      }
    }
  }

  // Adds the products of one tile. The columns of a block are permuted in the same way on both sides: a lane's first eight bytes are what
  // one instruction takes from it, its last eight what the next one takes.
  template <typename Filler>
  __device__ void add_tile(const XChunk<Size>& x, int chunk, float (&sum)[kLineTiles][4], Filler& filler) {
    uint4 low[kBlocksPerWarp], high[kBlocksPerWarp];  // rows g and g + 8
    wait_barrier(&ring.full[stage.index], stage.parity);
    const unsigned char* tile =
        ring.tiles + stage.index * kStageBytes + group * kRowPitch + (warp * kBlocksPerWarp * kBlock + thread * 8) * 2;
    uint32_t loaded = 0;
#pragma unroll
    for (int b = 0; b < kBlocksPerWarp; ++b) {
      low[b] = *reinterpret_cast<const uint4*>(tile + b * kBlock * 2);
      high[b] = *reinterpret_cast<const uint4*>(tile + kPanel * kRowPitch + b * kBlock * 2);
      loaded |= low[b].w | high[b].w;
    }
    __syncwarp();
    if (group == 0 && thread == 0) arrive(&ring.empty[stage.index], loaded & p.zero);
    stage.advance(ring);
    filler.fill_next();
#pragma unroll
    for (int b = 0; b < kBlocksPerWarp; ++b) {
      if (column(chunk, b) >= p.k) low[b] = high[b] = make_uint4(0, 0, 0, 0);  // past the end of a row the ring holds anything
      const uint32_t first[4] = {low[b].x, high[b].x, low[b].y, high[b].y}, second[4] = {low[b].z, high[b].z, low[b].w, high[b].w};
#pragma unroll
      for (int n = 0; n < kLineTiles; ++n) multiply_bf16(sum[n], first, {x.v[b][n].x, x.v[b][n].y});
#pragma unroll
      for (int n = 0; n < kLineTiles; ++n) multiply_bf16(sum[n], second, {x.v[b][n].z, x.v[b][n].w});
    }
  }
};

}  // namespace photon::cuda::stream_linear
