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
// of fewer columns, have a sum of their own, which enters that of their row by one fma with the
// scale. It begins at zero; of int4 without offsets at minus what 128 and the zero point add.
// So the order of summation does not depend on the number of tokens.
//
// - fp8: an instruction makes float16 of them, which has all e4m3 numbers. x is brought into its
//   range by a power of two of a token's part of a K block.
// - int4: 0x4300 | q is 128 + q in bfloat16. That 128, and the zero point, are taken out with the
//   sum of x, which an instruction with a left operand of ones gives. An offset is added with it.
// - int8: 0x6400 | q is 1024 + q in float16, from which 1024 + 128 is subtracted. x is as for fp8.
#pragma once
#include "common/weight.h"
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear {

namespace narrow {

// What a number of int4 is too large by, besides its zero point.
constexpr float kWideOnes = 128.0f;

// What a weight of integers has beside its scales.
enum class Zeros { kNone, kPoints, kOffsets };

// Scales, zero points or offsets of a weight of fewer bits, as copies of 4, 8 or 16 bytes see them.
// Rows lie close.
struct ScaleSource {
  const char* from;  // or null
  int row_parts;     // copies that a row of the tensor takes
  int part_bits;     // a copy has 2^part_bits bytes
  int bits;          // of a row, a K chunk takes 2^bits copies

  // Whether all K chunks have the same.
  __device__ bool is_one() const { return row_parts == 1 && bits == 0; }

  // Whether a row's K chunk is so many bytes, in copies of 16.
  __device__ bool has_vectors(int bytes) const { return part_bits == 4 && 16 << bits == bytes; }
};

// Two bytes for each group of a K block: floats of one of two types.
template <int kGroups>
struct PackedGroups {
  static_assert(kGroups == 4 || kGroups == 8);
  uint32_t words[kGroups / 2];

  // `is_whole`: memory has a scale for each group. Else it has half as many, each for two
  // neighbouring groups. The address is a multiple of what is read.
  __device__ void load(const void* at, bool is_whole) {
    if constexpr (kGroups == 8) {
      const uint4 v = *static_cast<const uint4*>(at);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if (is_whole) {
      const uint2 v = *static_cast<const uint2*>(at);
      words[0] = v.x, words[1] = v.y;
    } else {
      const uint32_t v = *static_cast<const uint32_t*>(at);
      words[0] = __byte_perm(v, 0, 0x1010), words[1] = __byte_perm(v, 0, 0x3232);
    }
  }
  // Of float16, or else bfloat16.
  __device__ float of(int group, bool is_half) const {
    const float2 pair = is_half ? floats_of_halves(words[group / 2])
                                : make_float2(__uint_as_float(words[group / 2] << 16),
                                              __uint_as_float(words[group / 2] & 0xffff0000u));
    return group % 2 == 0 ? pair.x : pair.y;
  }
};

// A byte for each of four groups.
struct PackedPoints {
  uint32_t bytes;

  __device__ void load(const void* at, bool is_whole) {
    bytes = is_whole ? *static_cast<const uint32_t*>(at)
                     : __byte_perm(*static_cast<const uint16_t*>(at), 0, 0x1100);
  }
  __device__ float of(int group) const { return static_cast<float>(bytes >> group * 8 & 0xffu); }
};

// Of a row and K block.
template <int kGroups, Zeros kZeros>
struct PackedScales {
  PackedGroups<kGroups> scales;

  __device__ void load(const void* scale, const void*, bool is_whole) {
    scales.load(scale, is_whole);
  }
};

template <int kGroups>
struct PackedScales<kGroups, Zeros::kPoints> {
  PackedGroups<kGroups> scales;
  PackedPoints points;

  __device__ void load(const void* scale, const void* point, bool is_whole) {
    scales.load(scale, is_whole);
    points.load(point, is_whole);
  }
};

template <int kGroups>
struct PackedScales<kGroups, Zeros::kOffsets> {
  PackedGroups<kGroups> scales, offsets;

  __device__ void load(const void* scale, const void* offset, bool is_whole) {
    scales.load(scale, is_whole);
    offsets.load(offset, is_whole);
  }
};

// What is left of the offset of numbers that are kWideOnes too large.
template <int kGroups>
__device__ inline float offset_of_wide(const PackedScales<kGroups, Zeros::kOffsets>& of,
                                       int group) {
  return fmaf(-kWideOnes, of.scales.of(group, true), of.offsets.of(group, true));
}

struct StoredScales {
  ScaleSource scales, zeros;  // zeros: or offsets
  int row_shift;              // 2^row_shift rows share theirs
  int group_bits;             // of groups below 128 columns: a K block has 2^group_bits
  bool has_all_groups;        // as many as Load takes, else half of them
  bool is_half;               // of integers: float16, else bfloat16
};

struct StoredParams : Params {
  StoredScales stored;
  int partial_bytes;  // of shared memory for sums of a pass; none where there is one pass, which
                      // leaves its ring to them
};

// Two lanes, whose numbers differ by `mask`, exchange the words that they do not keep.
__device__ inline void exchange_words(uint32_t& low, uint32_t& high, bool keeps_high, int mask) {
  const uint32_t other = __shfl_xor_sync(kFullWarp, keeps_high ? low : high, mask);
  (keeps_high ? low : high) = other;
}

// Brings words of x into the order that instructions take: word i of the lane with thread j becomes
// word j of the lane with thread i. That lane's words then are of columns 8 j + 2 i.
__device__ inline void turn_words(uint4& v) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
  exchange_words(v.x, v.y, is_odd, 1);
  exchange_words(v.z, v.w, is_odd, 1);
  exchange_words(v.x, v.z, is_high, 2);
  exchange_words(v.y, v.w, is_high, 2);
}

constexpr int kLaneColumns = 8;  // of x, from thread to thread

// Eight columns of x, of the 32 that begin where the lane's own begin, and their gains.
__device__ inline uint4 load_x(bool is_there, const Bf16* from) {
  return load_fresh_if(is_there, reinterpret_cast<const uint4*>(from));
}
__device__ inline uint4 load_gains(const unsigned char* from) {
  return *reinterpret_cast<const uint4*>(from);
}

// bfloat16, which has no scales.
struct DenseLoad {
  using Params = stream_linear::Params;
  static constexpr bool kIsF16 = false;
  static constexpr int kLag = 1;  // of a ring's stages (narrow_ring.cuh)
  static constexpr bool kIsScaled = false, kIsPacked = false;
  static constexpr Zeros kZeros = Zeros::kNone;
  static constexpr float kExcess = 0.0f;
  static constexpr int kScalePitch = 0, kZeroPitch = 0;
  static constexpr int kGroups = 1;
  static constexpr int kColumns = kKBlockColumns;  // of a K block
  static constexpr int kBlocks = kKBlocks;         // of 128 bytes, of a row in a tile
  static constexpr int kStageTiles = 1;
  static constexpr int kMatrices = kDepths;  // loads of four 8 x 8 matrices

  // Of a lane, which points load_matrices() to a row of one of four matrices: bytes from the start
  // of an 8-row tile.
  __device__ static int offset(int warp, int matrix, int row, int load) {
    return warp * kKBlockBytes + row * kKBlockColumns * 2 + ((load * 2 + matrix / 2) ^ row) * 16;
  }

  __device__ static void order(uint4& x) { turn_words(x); }

  __device__ static void decode(const uint32_t (&w)[kMatrices][4], int depth, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = w[depth][i];
  }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_bf16(d, a, b);
  }
};

// Eight bits, of which kHalves makes float16: the lower two and the upper two of a word.
template <auto kHalves>
struct ByteLoad {
  using Params = StoredParams;
  static constexpr bool kIsF16 = true;  // of what instructions take
  static constexpr int kLag = 2;
  static constexpr bool kIsScaled = true;
  static constexpr Zeros kZeros = Zeros::kNone;
  static constexpr float kExcess = 0.0f;
  static constexpr bool kTakesSums = false;
  static constexpr int kColumns = 128, kBlocks = kKBlocks, kStageTiles = 1, kMatrices = 4;
  static constexpr int kXRows = 1;  // of what comes with a K block of x, for each token
  static constexpr int kZeroPitch = 0;

  __device__ static int offset(int warp, int matrix, int row, int load) {
    return DenseLoad::offset(warp, matrix, row, load);
  }

  // A lane has columns 8 t .. + 7 of 32, and gets 4 t .. + 3 and those that come 16 behind them.
  __device__ static void order(uint4& x) {
    const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
    exchange_words(x.x, x.z, is_odd, 1);
    exchange_words(x.y, x.w, is_odd, 1);
    exchange_words(x.x, x.z, is_high, 2);
    exchange_words(x.y, x.w, is_high, 2);
  }

  __device__ static void decode(const uint32_t (&w)[kMatrices][4], int depth, uint32_t (&a)[4]) {
#pragma unroll
    for (int rows = 0; rows < 2; ++rows) {
      uint32_t pairs[2];
      kHalves(pairs, w[depth / 2][depth % 2 * 2 + rows]);
      a[rows] = pairs[0];
      a[rows + 2] = pairs[1];
    }
  }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_f16(d, a, b);
  }
};

// e4m3 with float32 scales: of a row, of a row and K block, or of 128 rows and a K block.
struct Fp8Load : ByteLoad<halves_of_e4m3> {
  static constexpr bool kIsPacked = false;
  static constexpr int kGroups = 1;       // of a K block: each has a scale
  static constexpr int kScalePitch = 32;  // of a row in a stage

  // Of the warp's K block in a row's scales.
  __device__ static int scale_offset(const StoredScales& stored, int warp) {
    return stored.scales.is_one() ? 0 : warp * 4;
  }
  __device__ static float scale(const StoredScales&, const unsigned char* at) {
    return *reinterpret_cast<const float*>(at);
  }
};

// Integers, with scales of float16 for groups of 128 / kGroups columns.
template <int kGroups_>
struct Int8Load : ByteLoad<halves_of_int8> {
  static constexpr int kGroups = kGroups_;
  static constexpr bool kIsPacked = true, kIsHalf = true;
  static constexpr int kScalePitch = 16 * kGroups;

  __device__ static int scale_offset(const StoredScales&, int warp) { return warp * kGroups * 2; }
};

// Four bits, with scales of two bytes for groups of 128 / kGroups columns. Groups of 64 columns are
// taken for two of 32, which have the same scale; not where there are offsets, which are float16.
template <int kGroups_, int kStageTiles_, Zeros kZeros_>
struct Int4Load {
  using Params = StoredParams;
  static constexpr bool kIsF16 = false;
  static constexpr int kLag = 2;
  static constexpr bool kIsScaled = true, kIsPacked = kGroups_ > 1;
  static constexpr bool kIsHalf = kZeros_ == Zeros::kOffsets;  // scales are of float16 alone
  static constexpr Zeros kZeros = kZeros_;
  static constexpr float kExcess = kWideOnes + 8;  // of numbers where there are no zero points
  static constexpr bool kTakesSums = kZeros != Zeros::kOffsets;  // of x, before products are added
  static constexpr int kColumns = 128, kBlocks = kKBlocks / 2, kMatrices = 2;
  static constexpr int kStageTiles = kStageTiles_;
  static constexpr int kGroups = kGroups_, kXRows = kGroups;

  // Two warps share a block of 128 bytes.
  __device__ static int offset(int warp, int matrix, int row, int load) {
    return warp / 2 * kKBlockBytes + row * kKBlockColumns * 2 +
           ((warp % 2 * 4 + load * 2 + matrix / 2) ^ row) * 16;
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
      a[i] = masked_or(bits >> (depth % 2 * 8 + i / 2 * 4), 0x000f000fu, 0x43004300u);
    }
  }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_bf16(d, a, b);
  }

  // Of a row in a stage.
  static constexpr int kScalePitch = 16 * kGroups,
                       kZeroPitch = kZeros == Zeros::kOffsets ? kScalePitch : 8 * kGroups;

  // Of the warp's K block in a row's scales, and in its zero points or offsets.
  __device__ static int scale_offset(const StoredScales& stored, int warp) {
    return groups_before(stored, warp) * 2;
  }
  __device__ static int zero_offset(const StoredScales& stored, int warp) {
    return groups_before(stored, warp) * (kZeros == Zeros::kOffsets ? 2 : 1);
  }
  // Of one group.
  __device__ static float scale(const StoredScales& stored, const unsigned char* at) {
    return wide(*reinterpret_cast<const uint16_t*>(at), stored.is_half);
  }

 private:
  __device__ static int groups_before(const StoredScales& stored, int warp) {
    return kGroups == 1 ? warp : warp << stored.group_bits;
  }
};

// Which load stage an integer weight has.
template <int kGroups_, Zeros kZeros_>
struct LoadKind {
  static constexpr int kGroups = kGroups_;
  static constexpr Zeros kZeros = kZeros_;
};

// launch(LoadKind), of an int4 weight.
template <typename Launch>
int with_int4_kind(const WeightScales& scales, const Launch& launch) {
  if (scales.offsets != nullptr) return launch(LoadKind<4, Zeros::kOffsets>{});
  const bool has_points = scales.zeros != nullptr;
  if (scales.columns < kScaleBlock)
    return has_points ? launch(LoadKind<4, Zeros::kPoints>{}) : launch(LoadKind<4, Zeros::kNone>{});
  return has_points ? launch(LoadKind<1, Zeros::kPoints>{}) : launch(LoadKind<1, Zeros::kNone>{});
}

// Of an int8 weight.
template <typename Launch>
int with_int8_kind(const WeightScales& scales, const Launch& launch) {
  return scales.columns == 16 ? launch(LoadKind<8, Zeros::kNone>{})
                              : launch(LoadKind<4, Zeros::kNone>{});
}

}  // namespace narrow
}  // namespace photon::cuda::stream_linear
