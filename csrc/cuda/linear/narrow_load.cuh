// How a warp of the narrow linears (narrow_linear.cuh) gets the left operands of its matrix
// instructions out of a tile, and what of x goes with them: the load stage of each weight format.
//
// A tile lies in the ring as its rows lie in memory, in blocks of 128 bytes of a row. Of every K
// chunk a warp has the same K block in all tiles: 64 columns of bfloat16, or 128 of fewer bits.
// Which of an instruction's 16 columns is which in the weight does not matter, as long as x comes
// in the same order. So stored weights are read as they are: a lane's four bytes of 8-row matrices
// are four columns of fp8 that follow one another, or eight of int4, and it loads those of x.
//
// Numbers of fewer bits are decoded without their scale. The products of a K block, or of a group
// of fewer columns, are summed from zero, and enter the sum of their row by one fma with the scale.
// So the order of summation does not depend on the number of tokens.
//
// - fp8: sign and magnitude are moved to where bfloat16 has them, and multiplied by 2^120.
// - int4: 0x4300 | q is 128 + q in bfloat16. That 128, and the zero point, are taken out with the
//   sum of x, which an instruction with a left operand of ones gives.
#pragma once
#include "common/weight.h"
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear {

namespace narrow {

// The scales of a weight of fewer bits, and its zero points, as copies of four bytes see them.
struct StoredScales {
  const uint32_t *scales, *zeros;  // zeros: or null
  int row_words, row_zero_words;   // of a row in memory; all rows lie close
  int row_shift;                   // 2^row_shift rows share theirs
  int word_bits, zero_bits;  // a stage has 2^word_bits of each of 16 rows: those of a K chunk, or
                             // one where a row has one
  int zeros_at, tile_bytes;  // of a tile in a stage: where zero points begin, and of both
  bool are_pairs;            // words of scales can be copied two at a time
  bool is_half;              // of int4: float16, else bfloat16
};

// Of groups of 32 columns with zero points.
constexpr int kMostScaleBytes = kTileRows * 4 * (16 + 8);  // of a tile

struct StoredParams : Params {
  StoredScales stored;
};

// Brings words of x into the order that instructions take: word i of the lane with thread j becomes
// word j of the lane with thread i. That lane's words then are of columns 8 j + 2 i.
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

// bfloat16, which has no scales.
struct DenseLoad {
  using Params = stream_linear::Params;
  static constexpr bool kIsScaled = false, kHasZeros = false;
  static constexpr int kGroups = 1;
  static constexpr int kColumns = kKBlockColumns;  // of a K block
  static constexpr int kBlocks = kKBlocks;         // of 128 bytes, of a row in a tile
  static constexpr int kStageTiles = 1;
  static constexpr int kMatrices = kDepths;  // loads of four 8 x 8 matrices
  static constexpr int kLaneColumns = 8;     // of x, from thread to thread

  // Of a lane, which points load_matrices() to a row of one of four matrices: bytes from the start
  // of an 8-row tile.
  __device__ static int offset(int warp, int matrix, int row, int load) {
    return warp * kKBlockBytes + row * kKBlockColumns * 2 + ((load * 2 + matrix / 2) ^ row) * 16;
  }

  // Eight columns of x, of the 32 that begin where the lane's own begin.
  __device__ static uint4 load_x(bool is_there, const Bf16* from) {
    return load_fresh_if(is_there, reinterpret_cast<const uint4*>(from));
  }
  __device__ static uint4 load_gains(const unsigned char* from) {
    return *reinterpret_cast<const uint4*>(from);
  }
  __device__ static void order(uint4& x) { turn_words(x); }

  __device__ static void decode(const uint32_t (&w)[kMatrices][4], int depth, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = w[depth][i];
  }
};

// e4m3 with float32 scales: of a row, of a row and K block, or of 128 rows and a K block.
struct Fp8Load {
  using Params = StoredParams;
  static constexpr bool kIsScaled = true, kHasZeros = false;
  static constexpr int kColumns = 128, kBlocks = kKBlocks, kStageTiles = 1, kMatrices = 4;
  static constexpr int kLaneColumns = 4;
  static constexpr int kGroups = 1;  // of a K block: each has a scale

  __device__ static int offset(int warp, int matrix, int row, int load) {
    return DenseLoad::offset(warp, matrix, row, load);
  }

  // Four columns, and those that come 16 behind them.
  __device__ static uint4 load_x(bool is_there, const Bf16* from) {
    const uint2 low = load_fresh_if(is_there, reinterpret_cast<const uint2*>(from));
    const uint2 high = load_fresh_if(is_there, reinterpret_cast<const uint2*>(from + 16));
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  // The same of a token's 64 columns in shared memory, of that half of them, where its vectors lie
  // as row_tile_map.cuh says.
  __device__ static uint4 read_x(const unsigned char* row, int swizzle, int half, int thread) {
    const int vector = half * 4 + thread / 2, within = thread % 2 * 8;
    const uint2 low = *reinterpret_cast<const uint2*>(row + (vector ^ swizzle) * 16 + within);
    const uint2 high =
        *reinterpret_cast<const uint2*>(row + ((vector + 2) ^ swizzle) * 16 + within);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  __device__ static uint4 load_gains(const unsigned char* from) {
    const uint2 low = *reinterpret_cast<const uint2*>(from);
    const uint2 high = *reinterpret_cast<const uint2*>(from + 32);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  // Columns 0 and 2, 1 and 3: the pairs that masks find.
  __device__ static void order(uint4& x) {
    x = make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
                   __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
  }

  __device__ static void decode(const uint32_t (&w)[kMatrices][4], int depth, uint32_t (&a)[4]) {
    constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x07f007f0u, kTwoTo120 = 0x7b807b80u;
#pragma unroll
    for (int rows = 0; rows < 2; ++rows) {
      const uint32_t bytes = w[depth / 2][depth % 2 * 2 + rows];
      a[rows] = times_bf16((bytes << 8 & kSign) | (bytes << 4 & kMagnitude), kTwoTo120);
      a[rows + 2] = times_bf16((bytes & kSign) | (bytes >> 4 & kMagnitude), kTwoTo120);
    }
  }

  __device__ static float scale(const StoredScales& stored, const unsigned char* at, int row,
                                int warp, int) {
    const int bits = stored.word_bits;
    return reinterpret_cast<const float*>(at)[(row << bits) + (bits > 0 ? warp : 0)];
  }
};

// Four bits, with scales of two bytes for groups of 128 / kGroups columns. Groups of 64 columns are
// taken for two of 32, which have the same scale.
template <int kGroups_, int kStageTiles_>
struct Int4Load {
  using Params = StoredParams;
  static constexpr bool kIsScaled = true, kHasZeros = true;
  static constexpr int kColumns = 128, kBlocks = kKBlocks / 2, kMatrices = 2;
  static constexpr int kStageTiles = kStageTiles_;
  static constexpr int kLaneColumns = 8;
  static constexpr int kGroups = kGroups_;

  // Two warps share a block of 128 bytes.
  __device__ static int offset(int warp, int matrix, int row, int load) {
    return warp / 2 * kKBlockBytes + row * kKBlockColumns * 2 +
           ((warp % 2 * 4 + load * 2 + matrix / 2) ^ row) * 16;
  }

  __device__ static uint4 load_x(bool is_there, const Bf16* from) {
    return DenseLoad::load_x(is_there, from);
  }
  __device__ static uint4 read_x(const unsigned char* row, int swizzle, int half, int thread) {
    return *reinterpret_cast<const uint4*>(row + ((half * 4 + thread) ^ swizzle) * 16);
  }
  __device__ static uint4 load_gains(const unsigned char* from) {
    return DenseLoad::load_gains(from);
  }
  // Columns 0 and 4, 1 and 5, 2 and 6, 3 and 7: the pairs that a shift and a mask find.
  __device__ static void order(uint4& x) {
    x = make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                   __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
  }

  // 128 + each number.
  __device__ static void decode(const uint32_t (&w)[kMatrices][4], int depth, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = w[depth / 4][depth / 2 % 2 * 2 + i % 2];
      a[i] = (bits >> (depth % 2 * 8 + i / 2 * 4) & 0x000f000fu) | 0x43004300u;
    }
  }

  __device__ static float scale(const StoredScales& stored, const unsigned char* at, int row,
                                int warp, int group) {
    const uint16_t* const scales = reinterpret_cast<const uint16_t*>(at);
    const uint16_t bits = scales[(row * 2 << stored.word_bits) + place(stored, warp, group)];
    return stored.is_half ? __half2float(__ushort_as_half(bits))
                          : __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }

  // What a number is more than it should be.
  __device__ static float excess(const StoredScales& stored, const unsigned char* at, int row,
                                 int warp, int group) {
    const unsigned char* const zeros = at + stored.zeros_at;  // where there are none, anything
    const float zero = zeros[(row * 4 << stored.zero_bits) + place(stored, warp, group)];
    return 128.0f + (stored.zeros == nullptr ? 8.0f : zero);
  }

 private:
  // Of a row's scales.
  __device__ static int place(const StoredScales& stored, int warp, int group) {
    if constexpr (kGroups == 1) return warp;
    const int each = stored.word_bits - 2;  // 2^each groups of a K block: 2 or 4
    return (warp << each) + (group << each) / kGroups;
  }
};

}  // namespace narrow
}  // namespace photon::cuda::stream_linear
