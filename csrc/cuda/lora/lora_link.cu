// lora_link: what adapters add between two fused linears, in one kernel: it ends the update of the
// linear before (+= B h), and begins that of the next one (A x).
//
// The work of a window of 32 tokens is divided into items: up to 8 of its tokens that have the
// same slot, and 256 columns. CTAs that each SM has one of take equal numbers of items, one behind
// the other, so that no grid depends on the slots. Of an item each warp has 32 columns, and each
// lane a vector of 8 of one token: it gets their sums over the ranks, adds them, and multiplies
// the result by the same columns of A. So nothing waits for a whole token: what A makes of 256
// columns is left in float32, and the next kernel adds that up, chunk after chunk. All orders of
// summation follow from the width and the rank.
//
// Matrix instructions multiply 16 ranks, or 16 columns, whose order within an instruction is free:
// it is chosen so that a lane's operands and results are what it has.
//
// With pdl, slots are read and weights brought before the wait. The next kernel may start behind
// it, and not before: the weights that it asks for would come before what this one waits for.
#include "common/lora.h"

#include <algorithm>

#include "cuda/lora/lora.h"
#include "cuda/lora/lora_items.cuh"
#include "cuda/residency.cuh"

namespace photon::cuda {
namespace link {
namespace {

constexpr int kWarps = 8, kAdders = kWarps * kWarpSize;
constexpr int kThreads = kAdders + kWarpSize;    // one more warp brings the weights
constexpr int kAddersBarrier = 1, kMeeting = 2;  // numbers of barriers
constexpr int kWarpColumns = kColumns / kWarps;
constexpr int kTile = 16;  // ranks, or rows of A, of a matrix instruction
constexpr int kPieceBytes = kTile * kColumns * 2;
constexpr int kSlabPieces = 4, kSlabBytes = kSlabPieces * kPieceBytes;
constexpr int kStages = 3;
constexpr int kPitch = kTile + 4;  // floats of a token in `partial`: its rows, and its square
constexpr int kPartialFloats = kWarps * kGroupTokens * kPitch;
constexpr int kSharedBytes = kStages * kSlabBytes + 2 * kPartialFloats * 4;  // without h
constexpr int kTokenThreads = kAdders / kGroupTokens;  // that add up the sums of a token
constexpr int kBatch = 5;                              // of whose loads so many are in flight

// The weights of an item are pieces, in the order in which they are used: 16 ranks of its 256 rows
// of B, then 16 rows of its columns of A. Up to four are a slab, a stage of a ring. All threads
// meet when one has landed: the warp that brings them is then one ahead, and nobody reads the one
// before.
struct Bringer {
  const Params& p;
  unsigned char* ring;
  int slabs = 0;

  __device__ void run(const Groups& groups, Items items) {
#pragma unroll 1
    for (; items.left > 0; items.advance(p, groups))
      if (items.group.slot > 0) bring(items);
    if (slabs < kStages - 1) wait_for_earlier();
    if (slabs == 0) return;
    wait_copies<0>();
    sync_threads(kMeeting, kThreads);
  }

 private:
  __device__ void bring(const Items& items) {
    const int lane = threadIdx.x % kWarpSize;
    const Columns columns(p, items.chunk);
    const int left = columns.end - columns.begin;
    const int64_t slot = items.group.slot - 1;
    const Bf16* const b = p.b + slot * p.b_slot_stride + columns.begin * p.rank;
    const Bf16* const a = p.a + slot * p.a_slot_stride + columns.begin;
#pragma unroll 1
    for (int piece = 0; piece < p.pieces; ++piece) {
      unsigned char* const to =
          ring + slabs % kStages * kSlabBytes + piece % kSlabPieces * kPieceBytes + lane * 16;
      if (piece < p.b_pieces) {  // a lane has half of every 16th row
        const bool is_up = piece >= p.steps;
        const int row = lane / 2;
        const int rank = (is_up ? piece - p.steps : piece) * kTile + lane % 2 * kPack;
        copy(to, b + (row + (is_up ? p.first_rows : 0)) * p.rank + rank, kTile * p.rank,
             rank < p.rank ? left - row : 0, kTile);
      } else {  // a lane has a vector of every row
        const int row = (piece - p.b_pieces) * kTile;
        copy(to, a + row * p.width + lane * kPack, p.width, lane * kPack < left ? p.rows - row : 0,
             1);
      }
      if ((piece + 1) % kSlabPieces == 0 || piece + 1 == p.pieces) end_slab();
    }
  }

  // A lane's vectors of a piece, `apart` elements from each other: those before `left`, counted by
  // `step`; zeros for the others.
  __device__ void copy(unsigned char* to, const Bf16* from, int apart, int left, int step) const {
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const bool is_there = i * step < left;
      async_copy16(to + i * kWarpSize * 16, is_there ? from + i * apart : p.x, is_there);
    }
  }

  __device__ void end_slab() {
    commit_copies();
    ++slabs;
    if (slabs < kStages - 1) return;
    if (slabs == kStages - 1) wait_for_earlier();
    wait_copies<kStages - 2>();
    sync_threads(kMeeting, kThreads);
  }
};
static_assert(kPieceBytes == kTile * kWarpSize * 16);

// The same pieces as the other warps see them.
struct Pieces {
  const Params& p;
  const unsigned char* ring;
  int stage = -1, piece = 0;

  // Valid until the first of another slab. All that the other threads did before is seen behind it.
  __device__ const unsigned char* next() {
    if (piece % kSlabPieces == 0) {
      sync_threads(kMeeting, kThreads);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    const unsigned char* const at = ring + stage * kSlabBytes + piece % kSlabPieces * kPieceBytes;
    if (++piece == p.pieces) piece = 0;
    return at;
  }
};

__device__ inline float2 floats_of(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Eight columns of a token.
struct Vector {
  uint32_t words[kPack / 2];

  // Past L1.
  __device__ static Vector load(bool valid, const Bf16* from) {
    uint4 v = {};
    if (valid) v = __ldcg(reinterpret_cast<const uint4*>(from));
    return {{v.x, v.y, v.z, v.w}};
  }
  __device__ void store(Bf16* to) const {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// What a lane has of an item: of one token a vector of x, and with SwiGLU that of the other half.
struct Share {
  int place;  // of the token in the window; -1: there is none
  Columns columns;
  int column;
  Vector x = {}, up = {}, gain = {};

  __device__ Share(const Params& p, const Items& items) : columns(p, items.chunk) {
    find(p, items);
  }

  // The next item, which `same_group` says is of the same group.
  __device__ void advance(const Params& p, const Items& items, bool same_group) {
    if (same_group && columns.advance()) {
      column += kColumns;
      load_gain(p);
    } else {
      columns = Columns(p, items.chunk);
      find(p, items);
    }
  }

  __device__ void load(const Params& p, int window) {
    const Bf16* const from = p.x + offset(window, p.x_stride);
    x = Vector::load(is_there(), from);
    if (p.act != nullptr) up = Vector::load(is_there(), from + p.first_rows);
  }

  __device__ void store(const Params& p, int window) const {
    if (is_there()) x.store((p.act != nullptr ? p.act : p.x) + offset(window, p.out_stride));
  }

  __device__ void exchange() {
    const Vector other = x;
    x = up;
    up = other;
  }

 private:
  __device__ void find(const Params& p, const Items& items) {
    const Lane lane;
    place = place_of(items.group.tokens, lane.group);
    column = columns.begin + lane.warp * kWarpColumns + lane.thread * kPack;
    load_gain(p);
  }
  __device__ void load_gain(const Params& p) {
    if (p.gain != nullptr) gain = Vector::load(column < columns.end, p.gain + column);
  }
  __device__ bool is_there() const { return place >= 0 && column < columns.end; }
  __device__ int64_t offset(int window, int stride) const {
    return static_cast<int64_t>(window + place) * stride + column;
  }
};

// The place of a group's token, from what the lanes have. All lanes.
__device__ inline int place_from(int lanes_place, int token) {
  return __shfl_sync(kFullWarp, lanes_place, token * 4);
}

// h of an item's tokens, [kGroupTokens, pitch]: what the kernel before the linear has left, of the
// part, or with SwiGLU of both. 32 threads have a token; those that share four ranks take every so
// many-th chunk.
__device__ inline void add_chunks(const Params& p, const Share& share, int window, Bf16* h) {
  const int own = static_cast<int>(threadIdx.x) / kTokenThreads;
  const int number = static_cast<int>(threadIdx.x) % kTokenThreads;
  const int sharers = 1 << p.sharer_bits, sharer = number & (sharers - 1);
  const int place = place_from(share.place, own);
  const int chunks = place >= 0 ? p.before_chunks : 0;
  const int64_t apart = static_cast<int64_t>(p.tokens) * p.before_words;
  const float* const token = p.before + static_cast<int64_t>(window + place) * p.before_words;
  const float* const squares = token + p.before_words - kLinkSpare;
  float square = 0.0f, scale = 1.0f;
  if (p.normalizes && number < chunks) square = __ldcg(squares + number * apart);
  for (int first = 0; first < p.quads; first += kTokenThreads >> p.sharer_bits) {
    const int quad = first + (number >> p.sharer_bits), rank = quad * 4;
    const bool is_rank = quad < p.quads;
    const float* from = token + share.columns.part * p.rank + rank + sharer * apart;
    float4 sum = {};
#pragma unroll 1
    for (int c = sharer; c < chunks; c += kBatch * sharers) {
      float4 loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i, from += sharers * apart)
        if (is_rank && c + i * sharers < chunks)
          loaded[i] = __ldcg(reinterpret_cast<const float4*>(from));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!is_rank || c + i * sharers >= chunks) continue;
        sum.x += loaded[i].x;
        sum.y += loaded[i].y;
        sum.z += loaded[i].z;
        sum.w += loaded[i].w;
      }
    }
    if (first == 0 && p.normalizes) {
#pragma unroll 1
      for (int c = number + kTokenThreads; c < chunks; c += kTokenThreads)
        square += __ldcg(squares + c * apart);
      scale = rsqrtf(warp_sum<kTokenThreads>(square) + p.eps);
    }
#pragma unroll 1
    for (int offset = 1; offset < sharers; offset *= 2) {
      sum.x += __shfl_xor_sync(kFullWarp, sum.x, offset);
      sum.y += __shfl_xor_sync(kFullWarp, sum.y, offset);
      sum.z += __shfl_xor_sync(kFullWarp, sum.z, offset);
      sum.w += __shfl_xor_sync(kFullWarp, sum.w, offset);
    }
    if (!is_rank || sharer != 0) continue;
    const int to = own * p.pitch + (rank < p.rank ? rank : rank - p.rank + p.steps * kTile);
    *reinterpret_cast<uint2*>(h + to) = make_uint2(pack_bf16(sum.x * scale, sum.y * scale),
                                                   pack_bf16(sum.z * scale, sum.w * scale));
  }
}

// The products of the warp's rows of B with h, added to the vectors of x: rows are taken in an
// order that gives each lane the columns of its vector.
__device__ inline void add_products(const Params& p, Pieces& pieces, const Bf16* h, Vector& x) {
  const Lane lane;
  const Bf16* from = h + lane.group * p.pitch + lane.thread * 4;
  const int first = lane.warp * kWarpColumns + lane.group / 2 * kPack + lane.group % 2;
  float products[kPack / 2][4] = {};
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step, from += kTile) {
    const unsigned char* const rows = pieces.next() + first * kTile * 2 + lane.thread * 8;
    const uint2 ranks = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int j = 0; j < kPack / 2; ++j) {
      const uint2 b = *reinterpret_cast<const uint2*>(rows + 2 * j * kTile * 2);
      multiply_bf16(products[j], {ranks.x, 0, ranks.y, 0}, {b.x, b.y});
    }
  }
#pragma unroll
  for (int j = 0; j < kPack / 2; ++j) {
    const float2 old = floats_of(x.words[j]),
                 sum = floats_of(pack_bf16(products[j][0], products[j][1]));
    x.words[j] = pack_bf16(old.x + sum.x, old.y + sum.y);
  }
}

// silu(x) * up in x. Words go round, so that the code is there once.
__device__ inline void swiglu(Share& share) {
  uint32_t (&gates)[kPack / 2] = share.x.words;
  uint32_t (&ups)[kPack / 2] = share.up.words;
#pragma unroll 1
  for (int turn = 0; turn < kPack / 2; ++turn) {
    const float2 gate = floats_of(gates[0]), up = floats_of(ups[0]);
    const uint32_t both = pack_bf16(to_float(silu_times<Bf16>(gate.x, up.x)),
                                    to_float(silu_times<Bf16>(gate.y, up.y)));
#pragma unroll
    for (int j = 0; j + 1 < kPack / 2; ++j) {
      gates[j] = gates[j + 1];
      ups[j] = ups[j + 1];
    }
    gates[kPack / 2 - 1] = both;
  }
}

// The sum of squares of a token's 32 columns, in all four lanes that have them.
__device__ inline float squares_of(const Vector& x) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPack / 2; ++j) {
    const float2 v = floats_of(x.words[j]);
    squares = fmaf(v.y, v.y, fmaf(v.x, v.x, squares));
  }
  return warp_sum<4>(squares);
}

// What a lane has of an item for A: its vector, multiplied by the gains if there are any, and the
// sum of squares before.
struct Multiplied {
  int place, chunk;
  Vector x;
  float squares = 0.0f;

  __device__ Multiplied(const Params& p, const Share& share, int chunk)
      : place(share.place), chunk(chunk), x(share.x) {
    if (p.gain == nullptr) return;
    squares = squares_of(x);
#pragma unroll
    for (int j = 0; j < kPack / 2; ++j) x.words[j] = times_bf16(x.words[j], share.gain.words[j]);
  }
};

// The products of an item's columns with A. `partial`: two places for the warps' sums; `turn` says
// which is next.
__device__ inline void leave_sums(const Params& p, Pieces& pieces, const Multiplied& item,
                                  int window, float* partial, int& turn) {
  const Lane lane;
  const int own = static_cast<int>(threadIdx.x) / kTile % kGroupTokens;
  const int row = static_cast<int>(threadIdx.x) % kTile;
  const int place = place_from(item.place, own);
  const bool leaves = place >= 0 && threadIdx.x < kGroupTokens * kTile;
  float* const out =
      p.after + (static_cast<int64_t>(item.chunk) * p.tokens + window + place) * p.after_words;
#pragma unroll 1
  for (int first = 0; first < p.rows; first += kTile, turn ^= 1) {
    const unsigned char* const piece =
        pieces.next() + lane.group * kColumns * 2 + lane.warp * kWarpColumns * 2 + lane.thread * 16;
    const uint4 a = *reinterpret_cast<const uint4*>(piece),
                b = *reinterpret_cast<const uint4*>(piece + kPieceBytes / 2);
    float d[4] = {};
    multiply_bf16(d, {a.x, b.x, a.y, b.y}, {item.x.words[0], item.x.words[1]});
    multiply_bf16(d, {a.z, b.z, a.w, b.w}, {item.x.words[2], item.x.words[3]});
    float* const sums = partial + turn * kPartialFloats;
    float* const warps = sums + lane.warp * kGroupTokens * kPitch;
    float* const to = warps + lane.thread * 2 * kPitch + lane.group;
    to[0] = d[0];
    to[kPitch] = d[1];
    to[kTile / 2] = d[2];
    to[kPitch + kTile / 2] = d[3];
    if (lane.thread == 0) warps[lane.group * kPitch + kTile] = item.squares;
    sync_threads(kAddersBarrier, kAdders);
    if (leaves) {
      const auto total = [&](int column) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp)
          sum += sums[(warp * kGroupTokens + own) * kPitch + column];
        return sum;
      };
      if (first + row < p.rows) out[first + row] = total(row);
      if (p.gain != nullptr && first + row == 0) out[p.rows] = total(kTile) * p.per_column;
    }
  }
}

// Goes through the items, as one of the threads that have a share of each.
__device__ inline void add(const Params& p, const Groups& groups, Items items, int window,
                           Pieces pieces, float* partial, Bf16* h) {
  for (int i = static_cast<int>(threadIdx.x); i < kGroupTokens * p.pitch; i += kAdders)
    h[i] = from_float<Bf16>(0.0f);                   // also ranks that are none
  int turn = 0, summed_group = -1, summed_part = 0;  // whose h is there
  Share share(p, items);
  wait_for_earlier();
  let_next_start();
  if (items.left == 0) return;

  share.load(p, window);
#pragma unroll 1
  for (;;) {
    const bool is_adapted = items.group.slot > 0;
    if (p.b != nullptr && is_adapted) {
      if (items.index != summed_group || share.columns.part != summed_part) {
        sync_threads(kAddersBarrier, kAdders);  // all have read what was there
        add_chunks(p, share, window, h);
        summed_group = items.index;
        summed_part = share.columns.part;
      }
#pragma unroll 1
      for (int half = 0;; ++half) {
        add_products(p, pieces, h + half * p.steps * kTile, share.x);
        if (p.act == nullptr) break;
        share.exchange();
        if (half == 1) break;
      }
    }
    if (p.act != nullptr) swiglu(share);
    if (p.b != nullptr) share.store(p, window);
    const Multiplied sent(p, share, items.chunk);
    const bool same_group = items.advance(p, groups);
    if (items.left > 0) {
      share.advance(p, items, same_group);
      share.load(p, window);  // while A is multiplied
    }
    if (p.a != nullptr && is_adapted) leave_sums(p, pieces, sent, window, partial, turn);
    if (items.left == 0) return;
  }
}

__global__ void __launch_bounds__(kThreads, 2) link_kernel(const Params p) {
  const int number = static_cast<int>(p.by_places.divides(blockIdx.x)), window = number * kWindow;
  const Groups groups(p.slots, window, p.tokens, p.act != nullptr);
  const Items items(p, groups, static_cast<int>(blockIdx.x) - number * p.places);
  unsigned char* const ring = dynamic_shared();
  float* const partial = reinterpret_cast<float*>(ring + kStages * kSlabBytes);
  Bf16* const h = reinterpret_cast<Bf16*>(partial + 2 * kPartialFloats);
  if (threadIdx.x < kAdders) {
    add(p, groups, items, window, Pieces{p, ring}, partial, h);
  } else {
    Bringer{p, ring}.run(groups, items);
  }
}

// Whether the linear before, which adds to the residual, has an SM alone: as
// cuda/linear/stream_linear.cu chooses.
bool follows_a_lone_linear(const Params& p) {
  return p.tokens > 32 || (p.tokens > 8 && p.before_chunks * kColumns > 8192);
}

// Of one size or the other, so that each SM gets one CTA (residency.cuh): beside the linear before,
// and beside the kernel that follows.
int shared_room(const Params& p) {
  const bool precedes_larger = p.act != nullptr || (p.a != nullptr && p.gain == nullptr);
  const bool follows_larger = p.b != nullptr && !p.normalizes && !follows_a_lone_linear(p);
  return precedes_larger || follows_larger ? kSmallerBlock : kLargerBlock;
}

Params params_of(const LoraLinkParams& op, int places) {
  Params p = {};
  const bool has_act = op.act != nullptr;
  p.x = static_cast<Bf16*>(op.x);
  p.act = static_cast<Bf16*>(op.act);
  p.b = static_cast<const Bf16*>(op.b);
  p.before = op.before;
  p.a = static_cast<const Bf16*>(op.a);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.after = op.after;
  p.slots = op.slots;
  p.a_slot_stride = op.a_slot_stride;
  p.b_slot_stride = op.b_slot_stride;
  p.tokens = static_cast<int>(op.tokens);
  p.width = static_cast<int>(link_width(op));
  p.x_stride = static_cast<int>(op.x_stride);
  p.out_stride = static_cast<int>(has_act ? op.act_stride : op.x_stride);
  p.rank = static_cast<int>(op.rank);
  p.first_rows = static_cast<int>(op.first_rows);
  p.other_rows = static_cast<int>(op.other_rows);
  p.rows = static_cast<int>(op.rows);
  p.places = places;
  p.first_chunks = static_cast<int>(link_chunks(op.first_rows));
  p.other_chunks = static_cast<int>(link_chunks(op.other_rows));
  p.chunks = p.first_chunks;
  if (!has_act && op.parts > 1) p.chunks += static_cast<int>(op.parts - 1) * p.other_chunks;
  p.steps = static_cast<int>(ceil_div(op.rank, kTile));
  p.b_pieces = (has_act ? 2 : 1) * p.steps;
  p.pieces = p.b_pieces + static_cast<int>(ceil_div(op.rows, kTile));
  p.pitch = (has_act ? 2 : 1) * p.steps * kTile + kPack;
  p.quads = static_cast<int>((has_act ? 2 : 1) * op.rank / 4);
  while (p.sharer_bits < 4 && p.quads << (p.sharer_bits + 1) <= kTokenThreads) ++p.sharer_bits;
  p.before_chunks = static_cast<int>(op.before_chunks);
  p.before_words = static_cast<int>(op.parts * op.rank + kLinkSpare);
  p.after_words = static_cast<int>(op.rows + kLinkSpare);
  p.eps = op.eps;
  p.per_column = 1.0f / static_cast<float>(p.width);
  p.normalizes = op.normalizes;
  p.by_places = Divisor(p.places);
  p.by_chunks = Divisor(p.chunks);
  return p;
}

}  // namespace
}  // namespace link

int lora_link(const LoraLinkParams& op, void* stream) {
  using namespace link;
  if (op.tokens == 0 || op.n == 0) return 0;
  const int64_t windows = ceil_div(op.tokens, kWindow);
  const Params p = params_of(op, static_cast<int>(std::max<int64_t>(sms() / windows, 1)));
  LaunchShape shape{windows * p.places, kThreads};
  shape.shared_bytes = static_cast<size_t>(kSharedBytes + kGroupTokens * p.pitch * 2);
  shape.pdl = op.pdl && hopper_runs();
  if (shape.pdl)
    shape.shared_bytes = std::max(shape.shared_bytes, static_cast<size_t>(shared_room(p)));
  return launch(link_kernel, shape, stream, p);
}

}  // namespace photon::cuda
