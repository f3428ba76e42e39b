// The work of lora_link: which tokens and columns a CTA has.
#pragma once
#include "common/lora.h"
#include "cuda/bf16.cuh"
#include "cuda/divisor.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda::link {

constexpr int kColumns = kLinkColumns;
constexpr int kWindow = kWarpSize;  // tokens, one a lane
constexpr int kGroupTokens = 8;

// An op's params, in 32 bits, and what the host works out.
struct Params {
  Bf16* x;
  Bf16* act;
  const Bf16* b;
  const float* before;
  const Bf16* a;
  const Bf16* gain;
  float* after;
  TokenSlots slots;
  int64_t a_slot_stride, b_slot_stride;
  int tokens, width, x_stride, out_stride;  // of x, or act
  int rank, first_rows, other_rows, rows;
  int places;  // CTAs of a window
  int chunks, first_chunks, other_chunks;
  int steps;               // of 16 ranks
  int b_pieces, pieces;    // of an item
  int pitch;               // of a token's h
  int quads, sharer_bits;  // of a token's h, four ranks each; 2^bits threads add up the same four
  int before_chunks, before_words, after_words;  // words: of a token's sums
  float eps, per_column;
  bool normalizes;
  Divisor by_places, by_chunks;
};

// A thread's place: the token of its group that is its own, and which of four vectors of 8 columns
// of its warp's 32.
struct Lane {
  int warp = static_cast<int>(threadIdx.x / kWarpSize);
  int group = static_cast<int>(threadIdx.x % kWarpSize / 4),
      thread = static_cast<int>(threadIdx.x % 4);
};

// Where the n-th bit is that is set, from 0; -1: there are fewer.
__device__ inline int place_of(unsigned bits, int n) {
#pragma unroll 1
  for (; n > 0; --n) bits &= bits - 1;
  return __ffs(static_cast<int>(bits)) - 1;
}

// Tokens of a window, as bits, that have a slot.
struct Group {
  int32_t slot = 0;
  unsigned tokens = 0;
};

// All groups of a window, as a warp sees them: lane i has token i.
struct Groups {
  int32_t slot;  // -1: there is no such token
  int number;    // of the token, among those of its slot
  unsigned firsts;

  // `all`: those without a slot are a group, too.
  __device__ Groups(const TokenSlots& slots, int first, int tokens, bool all) {
    const int lane = threadIdx.x % kWarpSize;
    slot = first + lane < tokens ? slot_of(slots, first + lane) : -1;
    number = __popc(__match_any_sync(kFullWarp, slot) & ((1u << lane) - 1));
    firsts = __ballot_sync(kFullWarp, slot >= (all ? 0 : 1) && number % kGroupTokens == 0);
  }

  __device__ Group at(int index) const {
    const int first = place_of(firsts, index);
    const int32_t own = __shfl_sync(kFullWarp, slot, first);
    const int tile = __shfl_sync(kFullWarp, number, first) / kGroupTokens;
    return {own, __ballot_sync(kFullWarp, slot == own && number / kGroupTokens == tile)};
  }
};

// The items of a CTA, from the one whose turn it is.
struct Items {
  int left, index, chunk;  // index: of the group
  Group group;

  __device__ Items(const Params& p, const Groups& groups, int place) {
    const int all = __popc(groups.firsts) * p.chunks;
    const int begin = static_cast<int>(p.by_places.divides(all * place));
    left = static_cast<int>(p.by_places.divides(all * (place + 1))) - begin;
    index = static_cast<int>(p.by_chunks.divides(begin));
    chunk = begin - index * p.chunks;
    if (left > 0) group = groups.at(index);
  }

  // Whether the next one is of the same group.
  __device__ bool advance(const Params& p, const Groups& groups) {
    --left;
    if (++chunk < p.chunks) return true;
    chunk = 0;
    ++index;
    if (left > 0) group = groups.at(index);
    return false;
  }
};

// Columns of one part.
struct Columns {
  int part = 0, begin, end;

  __device__ Columns(const Params& p, int chunk) {
    int before = 0;  // columns of other parts
    end = p.first_rows;
    for (int chunks = p.first_chunks; chunk >= chunks; chunks = p.other_chunks) {
      chunk -= chunks;
      before = end;
      end += p.other_rows;
      ++part;
    }
    begin = before + chunk * kColumns;
  }

  // Whether the next chunk is of the same part.
  __device__ bool advance() {
    begin += kColumns;
    return begin < end;
  }
};

}  // namespace photon::cuda::link
