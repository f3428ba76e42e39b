// What the Hopper kernels of adapters multiply, warp by warp: 16 rows of A with 8 tokens over some
// columns, and 16 rows of B with what A has made of 8 tokens. Every kernel that does so uses these,
// so that a token has the same bits in all of them.
//
// Order of summation of A x: slice j (of 8) of consecutive chunks of 512 columns in one running
// sum; slices 0 to 7 are added in order, then groups of chunks in order. Groups depend on k alone.
#pragma once
#include "common/lora.h"
#include "cuda/stream_common.cuh"

namespace photon::cuda::adapters {

using stream_linear::kChunk, stream_linear::kHalves, stream_linear::kSlices;

constexpr int kTileTokens = 8;
constexpr int kSums = 4;  // of a lane, of 16 rows by 8 tokens
constexpr int kTileSums = kSums * kWarpSize;
constexpr int kLeastChunks = 3;  // of a group

// Chunks of columns, and how they are added up in groups.
struct Chunks {
  int all, each, groups;
};

__host__ __device__ inline Chunks chunks_of(int k) {
  const int all = (k + kChunk - 1) / kChunk;
  const int even = (all + static_cast<int>(kLoraSums) - 1) / static_cast<int>(kLoraSums);
  const int each = even > kLeastChunks ? even : kLeastChunks;
  return {all, each, (all + each - 1) / each};
}

// The part of a linear that a row of its weight belongs to.
struct Parts {
  int count, first_rows, other_rows;

  __device__ int of(int row) const {
    return (row >= first_rows ? 1 : 0) + (row >= first_rows + other_rows ? 1 : 0);
  }
};

// A lane has rows g and g + 8 and token g, of a tile, and of every 32 columns 8 t .. + 7.
struct Lane {
  int g, t;
  __device__ Lane() : g(threadIdx.x % kWarpSize / 4), t(threadIdx.x % 4) {}
};

// Where sum i of a lane belongs, counting lane * kSums + i.
__device__ inline int row_of_sum(int sum) { return sum / kSums / 4 + sum % kSums / 2 * 8; }
__device__ inline int token_of_sum(int sum) { return sum / kSums % 4 * 2 + sum % 2; }

// Of a lane: its rows of A, its token, and the gains, from column 0 on. Null: zeros.
struct Sources {
  const Bf16 *low, *high, *x, *gains;
};

// Adds up the warp's slice of `count` chunks. kNormalizes: of x times gains; and squares of x are
// added up as the linears do.
template <bool kNormalizes>
__device__ inline void add_slices(float (&sums)[kSums], float (&squares)[2], const Sources& from,
                                  int first, int count, int k) {
  const int at = threadIdx.x / kWarpSize * kSliceColumns + Lane().t * 8;
  const auto load = [](const Bf16* row, bool valid, int column) {
    return load_fresh_if(row != nullptr && valid, reinterpret_cast<const uint4*>(row + column));
  };
#pragma unroll 1
  for (int done = 0; done < count; done += kLeastChunks) {
    uint4 low[kLeastChunks][kHalves], high[kLeastChunks][kHalves], x[kLeastChunks][kHalves];
#pragma unroll
    for (int c = 0; c < kLeastChunks; ++c) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int column = (first + done + c) * kChunk + at + h * 32;
        const bool valid = done + c < count && column < k;
        x[c][h] = load(from.x, valid, column);
        low[c][h] = load(from.low, valid, column);
        high[c][h] = load(from.high, valid, column);
      }
    }
#pragma unroll
    for (int c = 0; c < kLeastChunks; ++c) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        uint4 &v = x[c][h], &a = low[c][h], &b = high[c][h];
        if constexpr (kNormalizes) {
          const int column = (first + done + c) * kChunk + at + h * 32;
          uint4 gains = make_uint4(0, 0, 0, 0);
          if (column < k) gains = *reinterpret_cast<const uint4*>(from.gains + column);
          stream_linear::normalize(v, gains, squares);
        }
        multiply_bf16(sums, {a.x, b.x, a.y, b.y}, {v.x, v.y});
        multiply_bf16(sums, {a.z, b.z, a.w, b.w}, {v.z, v.w});
      }
    }
  }
}

// Each warp's sums are left in `partial` [kSlices][kTileSums].
__device__ inline void leave_sums(const float (&sums)[kSums], float* partial) {
  *reinterpret_cast<float4*>(partial + threadIdx.x * kSums) =
      make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// Sum number `sum`, of all warps.
__device__ inline float added_sums(const float* partial, int sum) {
  float total = partial[sum];
#pragma unroll
  for (int slice = 1; slice < kSlices; ++slice) total += partial[slice * kTileSums + sum];
  return total;
}

// A lane's columns 4 t .. + 3 of one of its rows of B, or of what A made of its token.
__device__ inline uint2 load_ranks(const Bf16* row, int rank) {
  const int at = Lane().t * 4;
  if (row == nullptr || at >= rank) return make_uint2(0, 0);
  return *reinterpret_cast<const uint2*>(row + at);
}

// The products of a tile of rows, whose halves may belong to two parts, with 8 tokens.
__device__ inline void expand_tile(float (&sums)[kSums], uint2 low, uint2 high, uint2 low_h,
                                   uint2 high_h) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  multiply_bf16(sums, {low.x, 0, low.y, 0}, {low_h.x, low_h.y});
  multiply_bf16(sums, {0, high.x, 0, high.y}, {high_h.x, high_h.y});
}

}  // namespace photon::cuda::adapters
