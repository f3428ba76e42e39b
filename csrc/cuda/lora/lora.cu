// lora_shrink and lora_expand: the two halves of an adapter, for tokens whose rows may each have
// another. A CTA takes a few tokens and goes through the slots that it finds among them, so that no
// grid depends on the slots and tokens without one cost their CTA two loads. The order of a sum
// depends on k, or the rank, alone.
#include "cuda/lora/lora.h"

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace {

constexpr int kShrinkThreads = 256;
constexpr int kShrinkWarps = kShrinkThreads / kWarpSize;
constexpr int kShrinkRows = 4;      // rows of A that a CTA multiplies
constexpr int64_t kFewTokens = 64;  // up to here CTAs of 2 tokens, so that there are many
constexpr int kExpandThreads = 128;
constexpr int kExpandTokens = 8;

// The slots of the CTA's tokens, 0 behind the last.
template <int kTokens>
__device__ inline void load_slots(const TokenSlots& slots, int64_t first, int64_t tokens,
                                  int32_t (&out)[kTokens]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) out[t] = first + t < tokens ? slot_of(slots, first + t) : 0;
}

// The tokens, as bits, that have the slot of the first of `left`.
template <int kTokens>
__device__ inline unsigned same_slot(const int32_t (&slots)[kTokens], unsigned left,
                                     int32_t& slot) {
  slot = 0;
  unsigned found = 0;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if ((left >> t & 1) == 0) continue;
    if (slot == 0) slot = slots[t];
    if (slots[t] == slot) found |= 1u << t;
  }
  return found;
}

// What a thread, and then a CTA, adds up: products of each token with each row.
template <int kTokens>
using ShrinkSums = float[kTokens][kShrinkRows];

// The thread's share of the tokens of `mask`: every 256th pack.
template <typename T, int kTokens, bool kVector>
__device__ inline void add_shares(const LoraShrinkParams& p, const T* x, const T* a, int rows,
                                  unsigned mask, ShrinkSums<kTokens>& sums) {
  for (int64_t d = static_cast<int64_t>(threadIdx.x) * kPack; d < p.k;
       d += kShrinkThreads * kPack) {
    Pack<T> w[kShrinkRows];
#pragma unroll
    for (int r = 0; r < kShrinkRows; ++r)
      w[r] = load_pack<kVector>(a + (r < rows ? r : 0) * p.a_stride + d, p.k - d);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if ((mask >> t & 1) == 0) continue;
      const Pack<T> xs = load_pack<kVector>(x + t * p.x_stride + d, p.k - d);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int r = 0; r < kShrinkRows; ++r)
          sums[t][r] = fmaf(to_float(xs.e[i]), to_float(w[r].e[i]), sums[t][r]);
      }
    }
  }
}

// The sums over the CTA, warp after warp, are left in `partial`. All threads must call it.
template <int kTokens>
__device__ inline void leave_sums(const ShrinkSums<kTokens>& sums, unsigned mask,
                                  ShrinkSums<kTokens> (&partial)[kShrinkWarps]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if ((mask >> t & 1) == 0) continue;
#pragma unroll
    for (int r = 0; r < kShrinkRows; ++r) {
      const float product = warp_sum(sums[t][r]);
      if (lane == 0) partial[warp][t][r] = product;
    }
  }
  __syncthreads();
}

// Output `row` of the CTA's token t, by one thread.
template <int kTokens>
__device__ inline float shrunk(const ShrinkSums<kTokens> (&partial)[kShrinkWarps], int t, int row) {
  float product = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kShrinkWarps; ++warp) product += partial[warp][t][row];
  return product;
}

template <typename T, int kTokens, bool kVector>
__global__ void __launch_bounds__(kShrinkThreads)
    shrink_kernel(const LoraShrinkParams p, int64_t row_tiles) {
  __shared__ ShrinkSums<kTokens> partial[kShrinkWarps];
  const int64_t first_token = blockIdx.x / row_tiles * kTokens;
  const int64_t first_row = blockIdx.x % row_tiles * kShrinkRows;
  const int rows = static_cast<int>(min(p.rows - first_row, static_cast<int64_t>(kShrinkRows)));
  int32_t slots[kTokens];
  load_slots(p.slots, first_token, p.tokens, slots);
  unsigned left = 0;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) left |= slots[t] > 0 ? 1u << t : 0;

  const T* const x = static_cast<const T*>(p.x) + first_token * p.x_stride;
  while (left != 0) {
    int32_t slot;
    const unsigned mask = same_slot(slots, left, slot);
    const T* const a =
        static_cast<const T*>(p.a) + (slot - 1) * p.a_slot_stride + first_row * p.a_stride;
    ShrinkSums<kTokens> sums = {};
    add_shares<T, kTokens, kVector>(p, x, a, rows, mask, sums);
    leave_sums(sums, mask, partial);
    const int t = threadIdx.x / kShrinkRows, row = threadIdx.x % kShrinkRows;
    if (t < kTokens && (mask >> t & 1) != 0 && row < rows) {
      T* const out = static_cast<T*>(p.out) + (first_token + t) * p.out_stride + first_row + row;
      *out = from_float<T>(shrunk(partial, t, row));
    }
    left &= ~mask;
    if (left != 0) __syncthreads();  // all have read the sums
  }
}

// Which part of the adapter an output row belongs to.
__device__ inline int64_t part_of(const LoraExpandParams& p, int64_t row) {
  return row < p.first_rows ? 0 : 1 + (row - p.first_rows) / p.other_rows;
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kExpandThreads)
    expand_kernel(const LoraExpandParams p, int64_t row_tiles) {
  const int64_t first_token = blockIdx.x / row_tiles * kExpandTokens;
  const int64_t row = blockIdx.x % row_tiles * kExpandThreads + threadIdx.x;
  int32_t slots[kExpandTokens];
  load_slots(p.slots, first_token, p.tokens, slots);
  if (row >= p.n) return;

  const T* const h =
      static_cast<const T*>(p.h) + first_token * p.h_stride + part_of(p, row) * p.rank;
  const T* const b = static_cast<const T*>(p.b) + row * p.b_stride;
  float sums[kExpandTokens] = {};
  for (int64_t r = 0; r < p.rank; r += kPack) {
    Pack<T> w = zero_pack<T>();
    int32_t loaded = 0;
#pragma unroll
    for (int t = 0; t < kExpandTokens; ++t) {
      if (slots[t] == 0) continue;
      if (slots[t] != loaded)
        w = load_pack<kVector>(b + (slots[t] - 1) * p.b_slot_stride + r, p.rank - r);
      loaded = slots[t];
      const Pack<T> hs = load_pack<kVector>(h + t * p.h_stride + r, p.rank - r);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[t] = fmaf(to_float(hs.e[i]), to_float(w.e[i]), sums[t]);
    }
  }
  T* const out = static_cast<T*>(p.out) + first_token * p.out_stride + row;
#pragma unroll
  for (int t = 0; t < kExpandTokens; ++t) {
    if (slots[t] == 0) continue;
    T& sum = out[t * p.out_stride];
    sum = from_float<T>(to_float(sum) + rounded<T>(sums[t]));
  }
}

template <typename T, int kTokens, bool kVector>
int launch_shrink(const LoraShrinkParams& p, void* stream) {
  const int64_t row_tiles = ceil_div(p.rows, kShrinkRows);
  return launch(shrink_kernel<T, kTokens, kVector>, ceil_div(p.tokens, kTokens) * row_tiles,
                kShrinkThreads, stream, p, row_tiles);
}

}  // namespace

int lora_shrink(const LoraShrinkParams& p, void* stream) {
  if (p.tokens == 0 || p.rows == 0) return 0;
  const bool vectors = p.k % kPack == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.a) &&
                       are_whole_vectors(p.dtype, p.x_stride, p.a_stride, p.a_slot_stride);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!vectors) return launch_shrink<T, 2, false>(p, stream);
    return p.tokens <= kFewTokens ? launch_shrink<T, 2, true>(p, stream)
                                  : launch_shrink<T, 8, true>(p, stream);
  });
}

int lora_expand(const LoraExpandParams& p, void* stream) {
  if (p.tokens == 0 || p.n == 0) return 0;
  const bool vectors = p.rank % kPack == 0 && is_vector_aligned(p.h) && is_vector_aligned(p.b) &&
                       are_whole_vectors(p.dtype, p.h_stride, p.b_stride, p.b_slot_stride);
  const int64_t row_tiles = ceil_div(p.n, kExpandThreads);
  const int64_t blocks = ceil_div(p.tokens, kExpandTokens) * row_tiles;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(vectors ? expand_kernel<T, true> : expand_kernel<T, false>, blocks,
                  kExpandThreads, stream, p, row_tiles);
  });
}

}  // namespace photon::cuda
