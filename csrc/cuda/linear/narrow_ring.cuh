// Shared memory of the narrow linears (narrow_linear.cuh): where things lie, and who brings them:
// tiles of the weight, with the scales of fewer bits, into a ring.
#pragma once
#include "cuda/linear/narrow_load.cuh"
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear {

namespace narrow {

constexpr int kWarps = kKBlocks;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPartialPitch = 18;  // floats per token of a partial tile: 16 rows, and 2 that keep
                                   // most of the writers' banks apart
constexpr int kSlotBytes = kWarps * kPartialPitch * 4;  // of all warps

// How many tiles a pass has in registers, how many K chunks of x are on their way, of how many
// eights of tokens, and how weights are loaded.
template <int kTiles_, int kAhead_, int kTokenTiles_ = 1, typename Load_ = DenseLoad>
struct Size {
  static_assert(kTiles_ % Load_::kStageTiles == 0);
  using Load = Load_;
  static constexpr int kTiles = kTiles_, kAhead = kAhead_, kTokenTiles = kTokenTiles_;
  static constexpr int kTokens = kTokenTiles * kTokenTile;
  static constexpr int kChunk = kKBlocks * Load::kColumns;  // columns of a K chunk
  static constexpr int kRowTileBytes = Load::kBlocks * kKBlockBytes;
  static constexpr int kTileBytes = 2 * kRowTileBytes;
  static constexpr int kScaleBytes = kTileRows * (Load::kScalePitch + Load::kZeroPitch);
  static constexpr int kResidents = kTiles * kTokenTiles > 12 ? 1 : 2;  // of an SM, by registers
  static constexpr int kPartialBytes = kSlotBytes * 3 * kTokenTile;     // of three eights of tokens
};

// Where things lie in a CTA's shared memory, in bytes from its start; the host sizes the launch
// with it.
template <typename Size>
struct Layout {
  static constexpr int kTokens = Size::kTokens;

  int ring, scales, gain, squares, old, peer, partial, barriers, end;

  constexpr __host__ __device__ Layout(int ring_bytes, int scale_bytes, int peer_tiles, int k,
                                       bool normalizes, bool adds,
                                       int partial_bytes = Size::kPartialBytes)
      : ring(0),
        scales(ring + ring_bytes),
        gain(scales + scale_bytes),
        squares(gain + (normalizes ? (k * 2 + 127) / 128 * 128 : 0)),
        old(squares + (normalizes ? kKBlocks * kTokens * 4 : 0)),
        peer(old + (adds ? Size::kTiles * kTileRows * kTokens * 2 : 0)),
        partial(peer + peer_tiles * kTileRows * kTokens * 4),
        barriers(partial + partial_bytes),
        end(barriers + kBarriers * static_cast<int>(sizeof(Barrier))) {}

  // Of the ring, and that the peer's sums are there.
  static constexpr int kBarriers = 2 * kMaxStages + 1;
};

template <typename Size>
__device__ inline int k_chunks_of(const CtaTiles& range) {
  return (range.k + Size::kChunk - 1) / Size::kChunk;
}

// Fills the ring with the CTA's tiles, in the order in which they are multiplied. Of eight
// consecutive stages each warp copies one.
template <typename Size, Epilogue kEpilogue>
struct Filler {
  using Load = typename Size::Load;
  static constexpr int kRowTileBytes = Size::kRowTileBytes, kStageTiles = Load::kStageTiles;
  // How many stages ago a stage was read when it is filled again. Where a stage takes a warp long,
  // the one before has not been read by all yet.
  static constexpr int kLag = Load::kLag;

  const typename Load::Params& p;
  const CtaTiles& range;
  const Ring& ring;
  unsigned char* scales;  // of the first stage
  uint64_t policy;
  Pass pass;  // of the stage that this warp copies next
  int k_chunk = 0, at = 0;
  int turn;  // how many stages the other warps copy before

  __device__ Filler(const typename Load::Params& p, const CtaTiles& range, const Ring& ring,
                    unsigned char* scales)
      : p(p),
        range(range),
        ring(ring),
        scales(scales),
        policy(evict_first()),
        pass(pass_from(0, p.pass_tiles, range.tiles)),
        turn(threadIdx.x / kWarpSize) {
    skip(turn);
  }

  // Before the first stage is read.
  __device__ void fill() {
    Stage stage;
#pragma unroll 1
    for (int i = 0; i < ring.stages; ++i) {
      if (turn-- == 0) copy(stage);
      stage.advance(ring.stages);
    }
    turn += kLag;  // when the first stage is read none is to be filled
  }

  // Called while the tiles of `stage` are read. Fills a stage before it again, which all warps have
  // read, or will have read soon.
  __device__ void refill(const Stage& stage) {
    if (turn-- == 0)
      copy(stage.index >= kLag ? Stage{stage.index - kLag, stage.parity ^ 1}
                               : Stage{ring.stages + stage.index - kLag, stage.parity});
  }

 private:
  // Of a K chunk of the pass.
  __device__ int stages_of_chunk() const { return (pass.count + kStageTiles - 1) / kStageTiles; }

  // Goes on by so many stages.
  __device__ void skip(int stages) {
    at += stages;
#pragma unroll 1
    while (pass.count > 0 && at >= stages_of_chunk()) {
      at -= stages_of_chunk();
      if (++k_chunk < k_chunks_of<Size>(range)) continue;
      k_chunk = 0;
      pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, range.tiles);
    }
  }

  __device__ void copy(const Stage& stage) {
    turn = kWarps - 1;
    if (pass.count <= 0) return;
    if constexpr (Load::kIsScaled) copy_scales(stage);
    if (is_elected()) copy_tiles(stage);
    skip(kWarps);
  }

  // Tiles of the stage that are there, at most kStageTiles.
  __device__ int tiles_of_stage() const {
    return kStageTiles == 1 ? 1 : min(kStageTiles, pass.count - at * kStageTiles);
  }

  __device__ TileRows rows_of(int tile) const {
    return tile_rows<kEpilogue>(p, range, pass.first + at * kStageTiles + tile);
  }

  __device__ void copy_tiles(const Stage& stage) const {
    unsigned char* place = ring.stage(stage.index);
    Barrier* full = &ring.full[stage.index];
    const RowTileMap& weight = p.weight[range.part];
    const int tiles = tiles_of_stage();
    const TileRows last = rows_of(tiles - 1);
    if constexpr (!Load::kIsScaled) wait_barrier(&ring.empty[stage.index], stage.parity ^ 1);
    arrive_expecting(full, (2 * tiles - (last.is_whole ? 0 : 1)) * kRowTileBytes);
#pragma unroll
    for (int i = 0; i < kStageTiles; ++i, place += Size::kTileBytes) {
      if (i >= tiles) break;
      const TileRows rows = kStageTiles == 1 ? last : rows_of(i);
      copy_row_tile(place, weight, rows.first, k_chunk * Load::kBlocks, full, policy);
      if (rows.is_whole) {
        copy_row_tile(place + kRowTileBytes, weight, rows.second, k_chunk * Load::kBlocks, full,
                      policy);
      }
    }
  }

  // All lanes.
  __device__ void copy_scales(const Stage& stage) const {
    wait_barrier(&ring.empty[stage.index], stage.parity ^ 1);
    unsigned char* const place = scales + stage.index * kStageTiles * Size::kScaleBytes;
    copy_parts(place, p.stored.scales, Load::kScalePitch);
    if constexpr (Load::kZeros != Zeros::kNone)
      copy_parts(place + kTileRows * Load::kScalePitch, p.stored.zeros, Load::kZeroPitch);
    arrive_when_copied(&ring.full[stage.index]);
  }

  // Those of the K chunk; what lies past the end of a row is zero.
  __device__ void copy_parts(unsigned char* to, const ScaleSource& source, int pitch) const {
    if constexpr (Load::kIsPacked) {
      if (pitch == Load::kScalePitch && source.has_vectors(pitch)) return copy_vectors(to, source);
    }
    const int first = (k_chunk + range.column / Size::kChunk) << source.bits,
              count = tiles_of_stage() * kTileRows << source.bits;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      const int in_row = i & ((1 << source.bits) - 1), tile = i >> source.bits >> 4,
                row = i >> source.bits & (kTileRows - 1);
      const TileRows rows = rows_of(tile);
      if (row >= kRowTileRows && !rows.is_whole) return;
      const int of = (row < kRowTileRows ? rows.first : rows.second) + row % kRowTileRows,
                part = source.is_one() ? 0 : first + in_row;
      const bool is_there = part < source.row_parts;
      const int64_t index =
          static_cast<int64_t>(of >> p.stored.row_shift) * source.row_parts + (is_there ? part : 0);
      async_copy_part(to + tile * Size::kScaleBytes + row * pitch + (in_row << source.part_bits),
                      source.from + (index << source.part_bits), source.part_bits, is_there);
    }
  }

  // The same where the scales of a row fill its place: several rows at a time, whose addresses take
  // few instructions.
  __device__ void copy_vectors(unsigned char* to, const ScaleSource& source) const {
    constexpr int kPitch = Load::kScalePitch, kParts = Load::kGroups, kRows = kWarpSize / kParts;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, first_row = lane / kParts,
              part = (k_chunk + range.column / Size::kChunk) * kParts + lane % kParts,
              tiles = tiles_of_stage();
    const bool is_there = part < source.row_parts;
    const char* const from = source.from + (is_there ? part : 0) * 16;
    to += first_row * kPitch + lane % kParts * 16;
#pragma unroll
    for (int i = 0; i < kStageTiles; ++i) {
      if (i >= tiles) break;
      const TileRows rows = rows_of(i);
#pragma unroll
      for (int row = 0; row < kTileRows; row += kRows) {
        if (row >= kRowTileRows && !rows.is_whole) break;
        const int first = row < kRowTileRows ? rows.first : rows.second,
                  of = first + row % kRowTileRows + first_row;
        async_copy16(to + i * Size::kScaleBytes + row * kPitch,
                     from + static_cast<int64_t>(of) * (source.row_parts * 16), is_there);
      }
    }
  }

  __device__ static void async_copy_part(unsigned char* to, const char* from, int bits,
                                         bool is_there) {
    if (bits == 4) {
      async_copy16(to, from, is_there);
    } else if (bits == 3) {
      async_copy<8>(to, from, is_there);
    } else {
      async_copy<4>(to, from, is_there);
    }
  }
};

}  // namespace narrow
}  // namespace photon::cuda::stream_linear
