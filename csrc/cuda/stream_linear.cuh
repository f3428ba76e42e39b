// The decode linears as one stream of weights, for Hopper: norm_linear, linear_residual and norm_swiglu in bfloat16, for up to 64 lines.
//
// A block owns a run of weight rows and takes them in tiles of 16 rows by 512 columns, which tensor copies bring into a ring in shared
// memory; its eight warps request them by turns. They need nothing of the kernel before, so with a programmatic launch the ring is full
// when that one ends. Each warp multiplies the same 64 of the 512 columns of every tile, with the weights as the left operand of the matrix
// instruction and up to eight lines as the right one. At the end the eight partial sums meet in shared memory.
//
// Blocks form clusters for two reasons. Where the rows do not divide well among the multiprocessors, two blocks take the same rows and half
// of the columns each, and the second sends its sums to the first. And many lines may be dealt out to groups: their blocks take the same
// rows, and each tile is read once for all of them.
//
// A chain runs several of these kernels one after the other, each for a few microseconds: their code must stay in the instruction cache
// together, and between the wait and the last store every dependent instruction counts. So loops are kept as loops, what can be computed on
// the host is, and addresses are computed before the wait.
//
// Which columns a warp adds, and in which order sums meet, depends on the weight's shape and on the device, never on the number of lines;
// and a line is a column of its own in every instruction. So a line has the same bits alone and in any batch.
#pragma once
#include "cuda/bf16.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/panel_map.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda::stream_linear {

enum class Epilogue { kStore, kResidual, kSwiglu };

struct Params {
  PanelMap lines_map;  // of x, where a ring brings it
  PanelMap weight[2];  // by rank in the cluster: its columns of [n, k]; kSwiglu: of [2n, k], gate rows, then up rows
  Bf16* out;           // [lines, n]; kResidual: read, added to and written
  const Bf16* x;       // [lines, k]
  const Bf16* gain;    // [k]: x is normalized by its root mean square and multiplied by this; null: x is taken as it is
  const Bf16* bias;    // a value per row of the weight, or null
  const int32_t* extent;
  int out_stride, x_stride;
  int lines, n, k;
  float eps, per_column;          // per_column: 1 / k
  int split;                      // parts of the columns, 1 or 2, of which a block takes one
  int groups;                     // of lines, 1 or 2, of which a block takes one. A cluster is a block for each part and group
  int k_each;                     // columns of a part, of whole chunks; the last one ends with k
  int panels_each, panels_extra;  // panels of rows that every cluster has; and how many clusters have one more
  int most_tiles, pass_tiles;     // tiles of a block at most; and of them, what one pass over x serves
  int stages, stage_bytes;        // tiles that the ring holds; of one, which is a panel where no block has two
  uint32_t zero;                  // 0; see arrive()
};

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kChunk = kPanelColumns;
constexpr int kTileRows = 16;
constexpr int kLineTile = 8;       // lines of one matrix instruction
constexpr int kHalves = 2;         // of a warp's columns: 32, whose weights are 16 bytes a lane and row and feed two matrix instructions
constexpr int kPartialPitch = 18;  // floats per line of a partial tile: 16 rows, and 2 that keep most of the writers' banks apart
constexpr int kPartialBytes = kWarps * kLineTile * kPartialPitch * 4 * 3;  // three tiles of eight lines
constexpr int kMaxStages = 12, kMaxXStages = 4;

static_assert(kPanelBlocks == kWarps, "a warp has a block of columns of its own");

template <Epilogue kEpilogue>
constexpr int kTilePanels = kEpilogue == Epilogue::kSwiglu ? 1 : 2;  // a SwiGLU tile is a panel of gate rows and the same one of up rows

// How many lines and tiles a kernel holds in registers, how x comes to them, and how many blocks of it a multiprocessor is to hold.
template <int kLineTiles_, int kTiles_, int kAhead_, int kXStages_, int kResidents_>
struct Size {
  static constexpr int kLineTiles = kLineTiles_;
  static constexpr int kTiles = kTiles_;          // tiles of 16 rows that one pass over x serves
  static constexpr int kAhead = kAhead_;          // chunks of x in registers
  static constexpr int kXStages = kXStages_;      // chunks of x in a ring of their own; 0: registers load them from global memory
  static constexpr int kResidents = kResidents_;  // two, where registers allow: the next kernel's ring fills while this one works
  static constexpr int kLines = kLineTiles * kLineTile;
  static constexpr bool kGroups = kXStages > 0;  // more lines than that may be dealt out to groups
  static constexpr int kXBytes = kXStages * kLineTiles * kPanelBytes;
};

// Where things lie in a block's shared memory, in bytes from its start; the host sizes the launch with it.
struct SharedLayout {
  int ring, x_ring, gain, squares, residual, peer, partial, barriers, end;

  constexpr __host__ __device__ SharedLayout(int ring_bytes, int x_bytes, int lines, int pass_tiles, int peer_tiles, int k, bool normalizes,
                                             bool adds)
      : ring(0),
        x_ring(ring + ring_bytes),
        gain(x_ring + x_bytes),
        squares(gain + (normalizes ? round_up(k * 2) : 0)),
        residual(squares + (normalizes ? kWarps * lines * 4 : 0)),
        peer(residual + (adds ? pass_tiles * kTileRows * lines * 2 : 0)),
        partial(peer + peer_tiles * kTileRows * lines * 4),
        barriers(partial + kPartialBytes),
        end(barriers + (2 * kMaxStages + 2 * kMaxXStages + 1) * static_cast<int>(sizeof(Barrier))) {}

  static constexpr __host__ __device__ int round_up(int bytes) { return (bytes + 127) / 128 * 128; }
};

// The part of the work that a block does: panels [first_panel, end_panel) of the rows, columns [column, column + k) in `chunks` chunks, and
// the lines from first_line on.
struct Share {
  int part, group;  // the block's rank in its cluster is part * groups + group
  int first_panel, end_panel, tiles, column, k, chunks, first_line;
};

// The groups of lines; known to be one where the size has no more.
template <typename Size>
__device__ inline int groups_of(const Params& p) {
  return Size::kGroups ? p.groups : 1;
}

template <typename Size, Epilogue kEpilogue>
__device__ inline Share block_share(const Params& p) {
  const int blocks = p.split * groups_of<Size>(p), cluster = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  Share share;
  share.part = rank / groups_of<Size>(p);
  share.group = rank % groups_of<Size>(p);
  share.first_panel = cluster * p.panels_each + min(cluster, p.panels_extra);
  share.end_panel = share.first_panel + p.panels_each + (cluster < p.panels_extra ? 1 : 0);
  share.tiles = (share.end_panel - share.first_panel + kTilePanels<kEpilogue> - 1) / kTilePanels<kEpilogue>;
  share.column = share.part * p.k_each;
  share.k = min(p.k_each, p.k - share.column);
  share.chunks = (share.k + kChunk - 1) / kChunk;
  share.first_line = share.group * Size::kLines;
  return share;
}

// A run of tiles that is multiplied in one pass over x, in tiles of the block's share.
struct Pass {
  int first, tiles;
};

__device__ inline Pass pass_from(const Params& p, const Share& share, int first) { return {first, min(p.pass_tiles, share.tiles - first)}; }

// The output (a column of out) that row r of a tile computes, or -1 where the tile reaches past the share or the weight.
template <Epilogue kEpilogue>
__device__ inline int output_of(const Params& p, const Share& share, int tile, int r) {
  const int panel = share.first_panel + tile * kTilePanels<kEpilogue> + (kEpilogue == Epilogue::kSwiglu ? 0 : r / kPanelRows);
  const int output = panel * kPanelRows + r % kPanelRows;
  return panel < share.end_panel && output < p.n ? output : -1;
}

// The row of a panel that lane group g multiplies. Neighbouring groups read their vectors in one cycle: their rows differ in bit 2, which
// in shared memory puts them into different halves of the banks (see panel_map.cuh).
__device__ inline int panel_row(int group) { return group >> 1 | (group & 1) << 2; }

// --- the ring ------------------------------------------------------------------------------------------------------------------------

struct Ring {
  unsigned char* tiles;
  Barrier* full;   // by stage: its tile has landed
  Barrier* empty;  // by stage: all warps of all groups have read its tile
  int stages, stage_bytes;

  __device__ unsigned char* tile(int stage) const { return tiles + stage * stage_bytes; }
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

  // Where the tile before this one was, for the tile that comes there after it.
  __device__ Stage before(const Ring& ring) const { return index > 0 ? Stage{index - 1, parity ^ 1} : Stage{ring.stages - 1, parity}; }
};

// Fills the ring with the tiles of a share in the order in which they are multiplied. Of eight tiles in a row each warp copies one.
template <typename Size, Epilogue kEpilogue>
struct Filler {
  const Params& p;
  const Share& share;
  const Ring& ring;
  uint64_t policy;
  Pass pass;  // of the tile that this warp copies next
  int chunk = 0, tile = 0;
  int turn;  // how many tiles the other warps copy before

  __device__ Filler(const Params& p, const Share& share, const Ring& ring)
      : p(p), share(share), ring(ring), policy(evict_first()), pass(pass_from(p, share, 0)), turn(threadIdx.x / kWarpSize) {
    skip(turn);
  }

  // Before the first tile is read.
  __device__ void fill() {
    Stage stage;
#pragma unroll 1
    for (int i = 0; i < ring.stages; ++i) {
      if (turn-- == 0) copy(stage);
      stage.advance(ring);
    }
    ++turn;  // while the first tile is read, there is no tile before
  }

  // Called while the tile of `stage` is read: the one before it has been, or will soon have been, by all warps; its stage is filled again.
  __device__ void refill(const Stage& stage) {
    if (turn-- == 0) copy(stage.before(ring));
  }

 private:
  // Goes on by so many tiles.
  __device__ void skip(int tiles) {
    tile += tiles;
#pragma unroll 1
    while (pass.tiles > 0 && tile >= pass.tiles) {
      tile -= pass.tiles;
      if (++chunk < share.chunks) continue;
      chunk = 0;
      pass = pass_from(p, share, pass.first + p.pass_tiles);
    }
  }

  __device__ void copy(const Stage& stage) {
    turn = kWarps - 1;
    if (pass.tiles <= 0) return;
    if (threadIdx.x % kWarpSize == 0) copy_tile(stage);
    skip(kWarps);
  }

  // Groups of lines need the same tiles: each group's block copies some of the panels, for all of them.
  __device__ void copy_tile(const Stage& stage) const {
    unsigned char* place = ring.tile(stage.index);
    Barrier* full = &ring.full[stage.index];
    const PanelMap& weight = p.weight[share.part];
    const int panel = share.first_panel + (pass.first + tile) * kTilePanels<kEpilogue>, row = panel * kPanelRows;
    const int second = kEpilogue == Epilogue::kSwiglu ? p.n + row : row + kPanelRows, block = chunk * kPanelBlocks;
    const bool is_whole = kEpilogue == Epilogue::kSwiglu || panel + 1 < share.end_panel;
    wait_barrier(&ring.empty[stage.index], stage.parity ^ 1);
    arrive_expecting(full, is_whole ? 2 * kPanelBytes : kPanelBytes);
    if (groups_of<Size>(p) == 1) {
      copy_panel(place, weight, row, block, full, policy);
      if (is_whole) copy_panel(place + kPanelBytes, weight, second, block, full, policy);
    } else {
      const uint16_t ranks = static_cast<uint16_t>(((1 << p.groups) - 1) << share.part * p.groups);
      if (share.group == 0) copy_panel_to(ranks, place, weight, row, block, full, policy);
      if (share.group == 1 && is_whole) copy_panel_to(ranks, place + kPanelBytes, weight, second, block, full, policy);
    }
  }
};

// A ring of chunks of x, for many lines: their loads take long, since all blocks want the same at once, and registers have no room for
// several chunks. It is filled after the wait.
template <typename Size>
struct XRing {
  static constexpr int kStages = Size::kXStages, kStageBytes = Size::kLineTiles * kPanelBytes;

  const Params& p;
  const Share& share;
  unsigned char* chunks;
  Barrier *full, *empty;
  int left;      // chunks that are to be copied yet, of all passes
  int next = 0;  // of its pass, the chunk that is copied next
  int index = 0;
  uint32_t parity = 0;
  bool is_first = true;

  __device__ const unsigned char* chunk() const { return chunks + index * kStageBytes; }

  __device__ void fill() {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) copy(i, 1);
  }

  // Waits for the next chunk; meanwhile the place of the one before is filled again.
  __device__ void take() {
    if (!is_first) copy(index > 0 ? index - 1 : kStages - 1, index > 0 ? parity : parity ^ 1);
    is_first = false;
    wait_barrier(&full[index], parity);
  }

  // All lanes of this warp have read the chunk; `after` is 0, made of what they read.
  __device__ void release(uint32_t after) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive(&empty[index], after);
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }

 private:
  // By one thread of the block; the others have nothing to do with it.
  __device__ void copy(int stage, uint32_t empty_parity) {
    if (threadIdx.x > 0 || left-- <= 0) return;
    wait_barrier(&empty[stage], empty_parity);
    arrive_expecting(&full[stage], kStageBytes);
#pragma unroll 1
    for (int n = 0; n < Size::kLineTiles; ++n) {
      copy_panel(chunks + stage * kStageBytes + n * kPanelBytes, p.lines_map, share.first_line + n * kLineTile,
                 share.column / kBlockColumns + next * kPanelBlocks, &full[stage], evict_last());
    }
    if (++next == share.chunks) next = 0;
  }
};

// --- products ------------------------------------------------------------------------------------------------------------------------

// What a lane holds of one chunk of x: with g = lane / 4 and t = lane % 4, of line 8i + g the columns 8t .. 8t + 7 of each half of 32.
template <typename Size>
struct XChunk {
  uint4 v[kHalves][Size::kLineTiles];
};

// A warp's sums over its columns, as seen from a lane. What it needs to find its way is computed before the wait.
template <typename Size, bool kNormalizes>
struct Multiplier {
  static constexpr int kLineTiles = Size::kLineTiles, kTiles = Size::kTiles, kAhead = Size::kAhead;

  const Params& p;
  const Share& share;
  const Ring& ring;
  int warp, group, thread;    // group = lane / 4: line and row; thread = lane % 4: columns
  int active;                 // lines of the block
  const Bf16* x_at;           // the lane's first columns, in its first line
  const unsigned char* gain;  // of those columns, in shared memory
  int columns;                // from the warp's first one to the end of the share
  int offset[kHalves];        // of the lane's weights in a panel
  Stage stage;
  float sums[kTiles][kLineTiles][4];
  float squares[kLineTiles][2];  // of lanes with group / 2 == thread: the sum of squares of line `group` is squares[..][group % 2]

  __device__ Multiplier(const Params& p, const Share& share, const Ring& ring, const unsigned char* gains, int active)
      : p(p),
        share(share),
        ring(ring),
        warp(computed_now(threadIdx.x / kWarpSize)),
        group(computed_now(threadIdx.x % kWarpSize / 4)),
        thread(computed_now(threadIdx.x % 4)),
        active(active) {
    const int column = share.column + warp * kBlockColumns + thread * 8, row = panel_row(group);
    x_at = computed_now(p.x + static_cast<int64_t>(share.first_line + group) * p.x_stride + column);
    gain = gains + computed_now(column * 2);
    columns = computed_now(share.k - warp * kBlockColumns);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      offset[h] = computed_now(warp * kBlockBytes + row * kBlockColumns * 2 + ((h * 4 + thread) ^ row) * 16);
    }
  }

  // The line, of a tile of eight, that an operand's column stands for: where a ring brings x, its rows lie like a weight's.
  __device__ static int line_of(int column) { return Size::kXStages > 0 ? panel_row(column) : column; }

  // The first chunks of x are on their way when this returns.
  __device__ void start(XChunk<Size> (&x)[kAhead]) const {
    if constexpr (Size::kXStages == 0) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) load(x[a], a);
    }
  }

  // The sums of one pass over x.
  template <typename Filler>
  __device__ void run(XChunk<Size> (&x)[kAhead], XRing<Size>& x_ring, const Pass& pass, Filler& filler) {
    clear();
#pragma unroll 1
    for (int chunk = 0; chunk < share.chunks; ++chunk) {
      if constexpr (Size::kXStages > 0) read(x[0], x_ring);
      add_chunk(x[0], chunk, pass, filler);
      if constexpr (Size::kXStages == 0) {
#pragma unroll
        for (int a = 1; a < kAhead; ++a) x[a - 1] = x[a];
        load(x[kAhead - 1], chunk + kAhead);
      }
    }
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      squares[n][0] = squares[n][1] = 0.0f;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[m][n][j] = 0.0f;
      }
    }
  }

  __device__ void load(XChunk<Size>& x, int chunk) const {
    const bool is_inside = chunk * kChunk < columns;  // a block of 64 columns is inside or outside as a whole
    const Bf16* from = x_at + chunk * kChunk;
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        x.v[h][n] = load_fresh_if(is_inside && n * kLineTile + group < active, reinterpret_cast<const uint4*>(from + h * 32));
      }
      from += kLineTile * p.x_stride;
    }
  }

  // The same from the ring. What lies past the share lies past x too (see k_each), and is zeros.
  __device__ void read(XChunk<Size>& x, XRing<Size>& x_ring) const {
    x_ring.take();
    uint32_t loaded = 0;
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        x.v[h][n] = *reinterpret_cast<const uint4*>(x_ring.chunk() + n * kPanelBytes + offset[h]);
        loaded |= x.v[h][n].w;
      }
    }
    x_ring.release(loaded & p.zero);
  }

  // x * gain, rounded; and the squares of x: the diagonal of x times its transpose.
  __device__ void normalize(XChunk<Size>& x, int half, int chunk) {
    uint4 gains = make_uint4(0, 0, 0, 0);
    if (chunk * kChunk < columns) gains = *reinterpret_cast<const uint4*>(gain + (chunk * kChunk + half * 32) * 2);
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      uint4& v = x.v[half][n];
      float products[4] = {squares[n][0], squares[n][1], 0.0f, 0.0f};
      multiply_bf16(products, {v.x, 0, v.y, 0}, {v.x, v.y});
      multiply_bf16(products, {v.z, 0, v.w, 0}, {v.z, v.w});
      squares[n][0] = products[0];
      squares[n][1] = products[1];
      v = make_uint4(times_bf16(v.x, gains.x), times_bf16(v.y, gains.y), times_bf16(v.z, gains.z), times_bf16(v.w, gains.w));
    }
  }

  // A lane's weights of half a tile: 16 bytes of a row of the first panel and of the second.
  struct Weights {
    uint4 low, high;

    __device__ Weights(const unsigned char* tile, int offset, bool has_second) {
      low = *reinterpret_cast<const uint4*>(tile + offset);
      high = has_second ? *reinterpret_cast<const uint4*>(tile + kPanelBytes + offset) : make_uint4(0, 0, 0, 0);
    }
    __device__ uint32_t loaded() const { return low.w | high.w; }
  };

  __device__ Weights weights_of(const Stage& of, int half) const {
    return Weights(ring.tile(of.index), offset[half], ring.stage_bytes > kPanelBytes);
  }

  // All lanes have read the tile; `loaded` is made of what they read last.
  __device__ void release(const Stage& of, uint32_t loaded) const {
    __syncwarp();
    const int lane = group * 4 + thread;
    if (groups_of<Size>(p) == 1) {
      if (lane == 0) arrive(&ring.empty[of.index], loaded & p.zero);
    } else if (lane < p.groups) {
      arrive_in_block(&ring.empty[of.index], share.part * p.groups + lane, loaded & p.zero);
    }
  }

  // Adds the products of half a tile. Its 32 columns are permuted in the same way on both sides: a lane's first eight bytes are what one
  // instruction takes from it, its last eight what the next one takes.
  __device__ static void add(float (&sum)[kLineTiles][4], const Weights& w, const uint4 (&x)[kLineTiles]) {
    const uint32_t first[4] = {w.low.x, w.high.x, w.low.y, w.high.y}, second[4] = {w.low.z, w.high.z, w.low.w, w.high.w};
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) multiply_bf16(sum[n], first, {x[n].x, x[n].y});
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) multiply_bf16(sum[n], second, {x[n].z, x[n].w});
  }

  // The tiles of a chunk, one after the other.
  template <typename Filler>
  __device__ void add_chunk(XChunk<Size>& x, int chunk, const Pass& pass, Filler& filler) {
    if constexpr (kNormalizes) {
      normalize(x, 0, chunk);
      normalize(x, 1, chunk);
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= pass.tiles) break;
      wait_barrier(&ring.full[stage.index], stage.parity);
      const Weights first = weights_of(stage, 0), second = weights_of(stage, 1);
      release(stage, first.loaded() | second.loaded());
      filler.refill(stage);
      stage.advance(ring);
      add(sums[m], first, x.v[0]);
      add(sums[m], second, x.v[1]);
    }
  }
};

}  // namespace photon::cuda::stream_linear
