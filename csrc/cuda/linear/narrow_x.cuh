// x as a warp's matrix instructions take it: of a K block and some eights of tokens. The narrow
// linears prepare it in registers, and for more tokens a kernel does so for all CTAs
// (prepare_x.cuh).
#pragma once
#include "cuda/linear/narrow_load.cuh"
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear::narrow {

// What a lane holds, by eights of tokens: of token `group` (lane / 4) the columns of the K block
// that Load says.
template <typename Load, int kTokenTiles>
struct XBlock {
  static constexpr int kVectors = Load::kColumns / 32;

  uint4 v[kTokenTiles][kVectors];
};

// Of one K block after the other.
template <typename Load, int kTokenTiles, bool kNormalizes>
struct XPreparer {
  using Block = XBlock<Load, kTokenTiles>;
  static constexpr int kVectors = Block::kVectors;

  float squares[kTokenTiles][2];              // sums, as normalize() has them
  float scales[kTokenTiles][2];               // of x, where Load takes float16
  float sums[Load::kGroups][kTokenTiles][2];  // of the K block, where Load asks for them

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      squares[t][0] = squares[t][1] = 0.0f;
      // The first stage of a pass adds zeros by them, and 0 * NaN would stay.
      if constexpr (Load::kIsPacked) scales[t][0] = scales[t][1] = 0.0f;
    }
  }

  // From x as it was loaded to what instructions take. `gains`: of the lane's columns, read where
  // the K block `is_inside`.
  __device__ void prepare(Block& x, const unsigned char* gains, bool is_inside) {
#pragma unroll
    for (int h = 0; h < kVectors; ++h) {
      uint4 gain = make_uint4(0, 0, 0, 0);
      if (kNormalizes && is_inside) gain = load_gains(gains + h * 32 * 2);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        if constexpr (kNormalizes) normalize(x.v[t][h], gain, squares[t]);
        Load::order(x.v[t][h]);
      }
    }
    if constexpr (Load::kExcess > 0) sum_up(x);
    if constexpr (Load::kIsF16) round_to_f16(x);
  }

 private:
  // Each token's part of x is multiplied by a power of two, so that its largest number is just
  // below 2^15: float16 has all of bfloat16's digits of what is above 2^-29 of that.
  __device__ void round_to_f16(Block& x) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      uint32_t pair = 0;
#pragma unroll
      for (int h = 0; h < kVectors; ++h) {
        const uint4 v = x.v[t][h];
        pair = larger_bf16(larger_bf16(larger_bf16(v.x, v.y), larger_bf16(v.z, v.w)), pair);
      }
      pair = larger_bf16(pair, __shfl_xor_sync(kFullWarp, pair, 1));
      pair = larger_bf16(pair, __shfl_xor_sync(kFullWarp, pair, 2));
      constexpr uint32_t kLeast = 15;  // of an exponent: its power's inverse is a number, too
      const uint32_t exponent = max(max(pair & 0xffffu, pair >> 16) >> 7, kLeast);
      const uint32_t power = (268 - exponent) << 7, powers = power << 16 | power;
#pragma unroll
      for (int h = 0; h < kVectors; ++h) {
        uint4& v = x.v[t][h];
        v = make_uint4(bf16_as_f16(times_bf16(v.x, powers)), bf16_as_f16(times_bf16(v.y, powers)),
                       bf16_as_f16(times_bf16(v.z, powers)), bf16_as_f16(times_bf16(v.w, powers)));
      }
      const float inverse = __uint_as_float((exponent - 14) << 23);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        scales[t][j] = __shfl_sync(kFullWarp, inverse, (2 * (threadIdx.x % 4) + j) * 4);
    }
  }

  // All rows of this product are the sums of x over the columns of a group.
  __device__ void sum_up(const Block& x) {
    constexpr uint32_t kOnes = 0x3f803f80u;
    constexpr int kEach = kVectors / Load::kGroups;
#pragma unroll
    for (int i = 0; i < Load::kGroups; ++i) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        float products[4] = {};
#pragma unroll
        for (int h = i * kEach; h < (i + 1) * kEach; ++h) {
          const uint4 v = x.v[t][h];
          multiply_bf16(products, {kOnes, kOnes, kOnes, kOnes}, {v.x, v.y});
          multiply_bf16(products, {kOnes, kOnes, kOnes, kOnes}, {v.z, v.w});
        }
        for (int j = 0; j < 2; ++j)
          sums[i][t][j] = Load::kZeros == Zeros::kNone ? -Load::kExcess * products[j] : products[j];
      }
    }
  }
};

}  // namespace photon::cuda::stream_linear::narrow
