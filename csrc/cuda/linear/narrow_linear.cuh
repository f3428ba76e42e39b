// The Hopper linears for up to 8 tokens.
//
// Tensor copies bring the weights into a ring in shared memory. A stage of the ring is a tile of 16
// rows by 512 columns, or half a tile where no CTA has more. The CTA's eight warps request the
// stages by turns. Weights depend on no other kernel, so that with a programmatic launch the ring
// is full when the kernel before ends. Each warp multiplies one K block of every tile: the weights
// are the left operand of the matrix instruction, the tokens the right one. At the end the sums of
// the eight warps are added up in shared memory.
//
// A chain runs several of these kernels one after the other, each for a few microseconds. So their
// code has to stay in the instruction cache together, and every dependent instruction between the
// wait and the last store costs time. This is why loops are not unrolled without need, why the host
// computes what it can, and why addresses are computed before the wait.
#pragma once
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear {

namespace narrow {

constexpr int kWarps = kKBlocks;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTokens = kTokenTile;
constexpr int kRowTileBytes = kKBlocks * kKBlockBytes;
constexpr int kPartialPitch = 18;  // floats per token of a partial tile: 16 rows, and 2 that keep
                                   // most of the writers' banks apart
constexpr int kPartialBytes = kWarps * kTokens * kPartialPitch * 4 * 3;  // three tiles

// Where things lie in a CTA's shared memory, in bytes from its start; the host sizes the launch
// with it.
struct Layout {
  int ring, gain, squares, old, peer, partial, barriers, end;

  constexpr __host__ __device__ Layout(int ring_bytes, int pass_tiles, int peer_tiles, int k,
                                       bool normalizes, bool adds)
      : ring(0),
        gain(ring + ring_bytes),
        squares(gain + (normalizes ? (k * 2 + 127) / 128 * 128 : 0)),
        old(squares + (normalizes ? kKBlocks * kTokens * 4 : 0)),
        peer(old + (adds ? pass_tiles * kTileRows * kTokens * 2 : 0)),
        partial(peer + peer_tiles * kTileRows * kTokens * 4),
        barriers(partial + kPartialBytes),
        end(barriers + (2 * kMaxStages + 1) * static_cast<int>(sizeof(Barrier))) {}
};

// How many tiles a pass has in registers, and how many K chunks of x are on their way.
template <int kTiles_, int kAhead_>
struct Size {
  static constexpr int kTiles = kTiles_, kAhead = kAhead_;
};

__device__ inline int k_chunks_of(const CtaTiles& range) {
  return (range.k + kKChunk - 1) / kKChunk;
}

// Fills the ring with the CTA's tiles, in the order in which they are multiplied. Of eight
// consecutive tiles each warp copies one.
template <Epilogue kEpilogue>
struct Filler {
  const Params& p;
  const CtaTiles& range;
  const Ring& ring;
  uint64_t policy;
  Pass pass;  // of the tile that this warp copies next
  int k_chunk = 0, tile = 0;
  int turn;  // how many tiles the other warps copy before

  __device__ Filler(const Params& p, const CtaTiles& range, const Ring& ring)
      : p(p),
        range(range),
        ring(ring),
        policy(evict_first()),
        pass(pass_from(0, p.pass_tiles, range.tiles)),
        turn(threadIdx.x / kWarpSize) {
    skip(turn);
  }

  // Before the first tile is read.
  __device__ void fill() {
    Stage stage;
#pragma unroll 1
    for (int i = 0; i < ring.stages; ++i) {
      if (turn-- == 0) copy(stage);
      stage.advance(ring.stages);
    }
    ++turn;  // while the first tile is read there is no tile before it, whose stage were to be
             // filled
  }

  // Called while the tile of `stage` is read. Fills the stage before it again, which all warps have
  // read, or will have read soon.
  __device__ void refill(const Stage& stage) {
    if (turn-- == 0)
      copy(stage.index > 0 ? Stage{stage.index - 1, stage.parity ^ 1}
                           : Stage{ring.stages - 1, stage.parity});
  }

 private:
  // Goes on by so many tiles.
  __device__ void skip(int tiles) {
    tile += tiles;
#pragma unroll 1
    while (pass.count > 0 && tile >= pass.count) {
      tile -= pass.count;
      if (++k_chunk < k_chunks_of(range)) continue;
      k_chunk = 0;
      pass = pass_from(pass.first + p.pass_tiles, p.pass_tiles, range.tiles);
    }
  }

  __device__ void copy(const Stage& stage) {
    turn = kWarps - 1;
    if (pass.count <= 0) return;
    if (is_elected()) copy_tile(stage);
    skip(kWarps);
  }

  __device__ void copy_tile(const Stage& stage) const {
    unsigned char* place = ring.stage(stage.index);
    Barrier* full = &ring.full[stage.index];
    const RowTileMap& weight = p.weight[range.part];
    const TileRows rows = tile_rows<kEpilogue>(p, range, pass.first + tile);
    wait_barrier(&ring.empty[stage.index], stage.parity ^ 1);
    arrive_expecting(full, rows.is_whole ? 2 * kRowTileBytes : kRowTileBytes);
    copy_row_tile(place, weight, rows.first, k_chunk * kKBlocks, full, policy);
    if (rows.is_whole)
      copy_row_tile(place + kRowTileBytes, weight, rows.second, k_chunk * kKBlocks, full, policy);
  }
};

// What a lane holds of one K chunk of x: the columns 32 h + 8 thread .. + 7 of its warp's K block,
// of token `group` (lane / 4).
struct XKChunk {
  uint4 v[kHalves];
};

// Brings them into the order that instructions take: word i of the lane with thread j becomes word
// j of the lane with thread i. That lane's words then are of columns 8 j + 2 i.
__device__ inline void turn_words(uint4& v) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
  const auto exchange = [](uint32_t& low, uint32_t& high, bool keeps_high, int mask) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, keeps_high ? low : high, mask);
    (keeps_high ? low : high) = other;
  };
  exchange(v.x, v.y, is_odd, 1);
  exchange(v.z, v.w, is_odd, 1);
  exchange(v.x, v.z, is_high, 2);
  exchange(v.y, v.w, is_high, 2);
}

// A warp's sums over its K blocks, as seen from a lane. All addresses are computed before the wait.
template <typename Size, bool kNormalizes>
struct Multiplier {
  static constexpr int kTiles = Size::kTiles, kAhead = Size::kAhead;

  const Ring& ring;
  uint32_t zero;
  int warp, group, thread;    // group = lane / 4: token and row; thread = lane % 4: columns
  bool is_active;             // there is such a token
  const Bf16* x_at;           // the lane's first columns, in its token
  const unsigned char* gain;  // of those columns, in shared memory
  int k_chunks, columns;      // of the CTA's range; from the warp's first K block to its end
  int offset[kDepths];        // of what the lane points load_matrices() to, in a tile
  Stage stage;
  float sums[kTiles][4];
  float squares[2];

  __device__ Multiplier(const Params& p, const CtaTiles& range, const Ring& ring,
                        const unsigned char* gains, int active)
      : ring(ring),
        zero(p.zero),
        warp(computed_now(threadIdx.x / kWarpSize)),
        group(computed_now(threadIdx.x % kWarpSize / 4)),
        thread(computed_now(threadIdx.x % 4)),
        is_active(group < active),
        k_chunks(k_chunks_of(range)) {
    const int column = range.column + warp * kKBlockColumns + thread * 8;
    x_at = computed_now(p.x + static_cast<int64_t>(group) * p.x_stride + column);
    gain = gains + computed_now(column * 2);
    columns = computed_now(range.k - warp * kKBlockColumns);
    // The four matrices are columns 0 .. 7 of the first 8-row tile and of the second one, then
    // columns 8 .. 15 of both. Where there is no second 8-row tile, the first one is read twice.
    const int matrix = threadIdx.x % kWarpSize / 8, row = threadIdx.x % 8,
              row_tile = p.stage_bytes > kRowTileBytes ? matrix % 2 : 0;
#pragma unroll
    for (int d = 0; d < kDepths; ++d) {
      offset[d] = computed_now(row_tile * kRowTileBytes + warp * kKBlockBytes +
                               row * kKBlockColumns * 2 + ((d * 2 + matrix / 2) ^ row) * 16);
    }
  }

  // The first K chunks of x are on their way when this returns.
  __device__ void start(XKChunk (&x)[kAhead]) const {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(x[a], a);
  }

  // The sums of one pass over x.
  template <typename Filler>
  __device__ void run(XKChunk (&x)[kAhead], const Pass& pass, Filler& filler,
                      const Stamps& stamps) {
    squares[0] = squares[1] = 0.0f;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) sums[m][0] = sums[m][1] = sums[m][2] = sums[m][3] = 0.0f;
#pragma unroll 1
    for (int k_chunk = 0; k_chunk < k_chunks; ++k_chunk) {
      add_k_chunk(x[0], k_chunk, pass, filler, stamps);
#pragma unroll
      for (int a = 1; a < kAhead; ++a) x[a - 1] = x[a];
      load(x[kAhead - 1], k_chunk + kAhead);
    }
  }

 private:
  __device__ void load(XKChunk& x, int k_chunk) const {
    const bool is_inside =
        k_chunk * kKChunk < columns && is_active;  // a K block is inside or outside as a whole
    const Bf16* from = x_at + k_chunk * kKChunk;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      x.v[h] = load_fresh_if(is_inside, reinterpret_cast<const uint4*>(from + h * 32));
  }

  // From x as it was loaded to what instructions take.
  __device__ void prepare(XKChunk& x, int k_chunk) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if constexpr (kNormalizes) {
        uint4 gains = make_uint4(0, 0, 0, 0);
        if (k_chunk * kKChunk < columns)
          gains = *reinterpret_cast<const uint4*>(gain + (k_chunk * kKChunk + h * 32) * 2);
        normalize(x.v[h], gains, squares);
      }
      turn_words(x.v[h]);
    }
  }

  // The tiles of a K chunk, one after the other.
  template <typename Filler>
  __device__ void add_k_chunk(XKChunk& x, int k_chunk, const Pass& pass, Filler& filler,
                              const Stamps& stamps) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= pass.count) break;
      wait_barrier(&ring.full[stage.index], stage.parity);
      uint32_t w[kDepths][4];
      uint32_t loaded = 0;
#pragma unroll
      for (int d = 0; d < kDepths; ++d) {
        load_matrices(w[d], ring.stage(stage.index) + offset[d]);
        loaded |= w[d][3];
      }
      if (m == 0)
        prepare(x, k_chunk);  // waits for x, while the first weights are on their way to registers
      if (m == 0 && k_chunk == 0 && pass.first == 0) stamps.at(Point::kLoaded);
      __syncwarp();  // all lanes have read the tile
      if (threadIdx.x % kWarpSize == 0) arrive(&ring.empty[stage.index], loaded & zero);
      filler.refill(stage);
      stage.advance(ring.stages);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) {
        const uint4 v = x.v[d / 2];
        if (d % 2 == 0) multiply_bf16(sums[m], w[d], {v.x, v.y});
        if (d % 2 == 1) multiply_bf16(sums[m], w[d], {v.z, v.w});
      }
    }
  }
};

// The end of a pass: the warps' sums are added up in a fixed order and become outputs.
template <typename Size, Epilogue kEpilogue>
struct Finish {
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;

  const Params& p;
  const Layout& at;
  unsigned char* shared;
  int tiles, active;  // tiles of the CTA's range, tokens that live

  template <typename T>
  __device__ T* place(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  // All threads must call it. The sums are added up in rounds of as many tiles as there is room
  // for. Where few tokens live, a tile takes less room; and in the last pass the ring is free,
  // which has room for many tiles.
  __device__ void run(const Multiplier<Size, kNormalizes>& warp, const Pass& pass,
                      const Output<kEpilogue>& output) const {
    const int column_bits = active <= 1 ? 0 : active <= 2 ? 1 : active <= 4 ? 2 : 3;
    const int slot = kWarps * kPartialPitch << column_bits;
    const bool uses_ring =
        pass.count * slot * 4 > kPartialBytes && pass.first + pass.count == tiles;
    float* const partials = place<float>(uses_ring ? at.ring : at.partial);
    const int at_once =
        (uses_ring ? p.stages * p.stage_bytes : kPartialBytes) / (kWarps * kPartialPitch * 4) >>
        column_bits;
    const unsigned g = threadIdx.x % kRowTileRows, tokens = 1u << column_bits;
    if (pass.first > 0 || uses_ring)
      __syncthreads();  // all have read what the pass before left, and the ring
    if (kNormalizes && warp.group / 2 == warp.thread) {
      place<float>(at.squares)[warp.warp * kTokens + warp.group] =
          warp.group % 2 == 0 ? warp.squares[0] : warp.squares[1];
    }
#pragma unroll 1
    for (int first = 0; first < pass.count; first += at_once) {
      const int count = min(at_once, pass.count - first);
      if (first > 0) __syncthreads();  // the round before has been read
      put_partials(warp, partials, column_bits, first, count);
      if (kEpilogue == Epilogue::kAdd && first == 0) wait_copies<0>();
      __syncthreads();
#pragma unroll 1
      for (unsigned i = threadIdx.x / kRowTileRows; i < count * tokens;
           i += kThreads / kRowTileRows) {
        const int token = i & (tokens - 1), tile = i >> column_bits;
        if (token >= active) continue;
        const float* partial = partials + tile * slot + token * kPartialPitch + g;
        float low = partial[0], high = partial[kRowTileRows];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          low += partial[w * kPartialPitch << column_bits];
          high += partial[(w * kPartialPitch << column_bits) + kRowTileRows];
        }
        output.take(first + tile, g, token, output.scale(token), low, high);
      }
    }
  }

 private:
  // This warp's tiles first .. first + count - 1.
  __device__ void put_partials(const Multiplier<Size, kNormalizes>& warp, float* partials,
                               int column_bits, int first, int count) const {
    float* slots = partials + (warp.warp * kPartialPitch << column_bits) + warp.group;
#pragma unroll
    for (int m = 0; m < Size::kTiles; ++m) {
      if (m < first || m >= first + count) continue;
      float* slot = slots + ((m - first) * kWarps * kPartialPitch << column_bits);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 2 * warp.thread + j;
        if (column >= 1 << column_bits) continue;
        slot[column * kPartialPitch] = warp.sums[m][j];
        slot[column * kPartialPitch + kRowTileRows] = warp.sums[m][j + 2];
      }
    }
  }
};

// What has to be done before the first copy of a weight. The gains are on their way when this
// returns.
template <Epilogue kEpilogue>
__device__ void begin_block(const Params& p, const Layout& at, const Ring& ring, Barrier* arrived,
                            const CtaTiles& range) {
  const int i = threadIdx.x;
  if (i == 0) prefetch_row_tile_map(p.weight[range.part]);
  if (i < p.stages) {
    init_barrier(&ring.full[i], 1);
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
__device__ void run_block(const Params& p) {
  constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;
  const Stamps stamps = stamps_of<kEpilogue>(p);
  let_next_start();
  // counts is read before the wait, as the weights are: if loads of x had to wait for it, they
  // would take twice as long. The kernel that writes it lets no other start.
  const int counts = live_tokens(p);
  unsigned char* shared = dynamic_shared();
  const CtaTiles range = cta_tiles<kEpilogue>(p);
  const Layout at(p.stages * p.stage_bytes, Size::kTiles, is_split<kEpilogue>(p) ? p.most_tiles : 0,
                  p.k, kNormalizes, !kNormalizes);
  Barrier* const barriers = reinterpret_cast<Barrier*>(shared + at.barriers);
  Barrier* const arrived = barriers + 2 * kMaxStages;
  const Ring ring{shared + at.ring, barriers, barriers + kMaxStages, p.stages, p.stage_bytes};
  Filler<kEpilogue> filler(p, range, ring);
  begin_block<kEpilogue>(p, at, ring, arrived, range);

  // A step without live tokens reads no weights, and some CTAs have no rows. They wait all the
  // same, because the next kernel takes this one's end for the end of all kernels before it.
  const int active = min(counts, p.tokens);
  if (active <= 0 || range.tiles == 0) {
    wait_copies<0>();
    return wait_for_earlier();
  }
  filler.fill();
  const Finish<Size, kEpilogue> finish{p, at, shared, range.tiles, active};
  Bf16* const old = finish.template place<Bf16>(at.old);
  Output<kEpilogue> output{p,
                           range,
                           finish.template place<const float>(at.squares),
                           old,
                           finish.template place<float>(at.peer),
                           arrived,
                           kTokens,
                           0};
  if (threadIdx.x == 0) output.expect_peer(active);
  Multiplier<Size, kNormalizes> multiplier(p, range, ring, shared + at.gain, active);
  XKChunk x[Size::kAhead];
  wait_copies<0>();
  __syncthreads();  // all gains are there
  wait_for_earlier();
  multiplier.start(x);  // first of all: not even what the compiler computes ahead of the loop
                        // comes before it
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
    multiplier.start(x);
  }
}

}  // namespace narrow
}  // namespace photon::cuda::stream_linear
