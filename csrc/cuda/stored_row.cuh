// Rows of a weight that is not dense, eight numbers at a time: the load stage of the portable
// linears, and what an embedding reads. A load fetches, `decode` computes: several loads are under
// way before the first is decoded.
#pragma once
#include "common/block_layout.h"
#include "cuda/element.cuh"

namespace photon::cuda {

// A number is fmaf(code - zero, scale, offset), with eight codes of a byte each; of fp8 the codes
// are e4m3 numbers, and there is but a scale. Every format has one rounding there.
struct StoredPack {
  uint64_t codes;
  float zero, scale, offset;
};

// A row from column `begin` on.
struct StoredRow {
  const uint8_t* data;  // of the whole row
  const void* scales;   // of the row, or null
  const uint8_t* zeros;
  const void* offsets;
  int64_t begin;
  int32_t scale_columns;
  WeightFormat format;
  DType scale_dtype;
  float divisor;
};

__device__ inline StoredRow operator+(StoredRow row, int64_t columns) {
  row.begin += columns;
  return row;
}

__device__ inline StoredRow stored_row(const Weight& w, int64_t r) {
  const WeightScales& s = w.scales;
  const int64_t place = s.data == nullptr ? 0 : r / s.rows * s.stride;
  const int64_t scale_bytes = is_fp4(w.format) ? 1 : size_of(s.dtype);
  return {
      static_cast<const uint8_t*>(w.data) + r * w.stride,
      static_cast<const uint8_t*>(s.data) + place * scale_bytes,
      s.zeros == nullptr ? nullptr : s.zeros + place,
      s.offsets == nullptr ? nullptr : static_cast<const uint8_t*>(s.offsets) + place * scale_bytes,
      0,
      static_cast<int32_t>(s.columns),
      w.format,
      s.dtype,
      s.divisors == nullptr ? 1.0f : s.divisors[r]};
}

constexpr uint64_t kEachByte = 0x0101010101010101;

// `count` bytes, at most kMost; kEven: all of them, at an even address.
template <bool kEven, int kMost = 8>
__device__ inline uint64_t load_codes(const uint8_t* p, int64_t count = kMost) {
  uint64_t codes = 0;
  if constexpr (kEven) {
#pragma unroll
    for (int i = 0; i < kMost / 2; ++i)
      codes |= static_cast<uint64_t>(reinterpret_cast<const uint16_t*>(p)[i]) << (16 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < count) codes |= static_cast<uint64_t>(p[i]) << (8 * i);
    }
  }
  return codes;
}

__device__ inline float half_at(const uint8_t* p) {
  const uint16_t bits = static_cast<uint16_t>(p[0] | p[1] << 8);
  return __half2float(__ushort_as_half(bits));
}

// The low or high four bits of each byte.
__device__ inline uint64_t four_bits(uint64_t codes, bool high) {
  return codes >> (high ? 4 : 0) & 15 * kEachByte;
}

// Eight bits as bytes of 16 or 0. A byte that is 2^i or 0 carries into its highest bit with 127.
__device__ inline uint64_t sixteen_where(uint32_t bits) {
  const uint64_t spread = (bits & 255) * kEachByte & 0x8040201008040201;
  return (spread + 127 * kEachByte) >> 3 & 16 * kEachByte;
}

__device__ inline float number_at(const void* numbers, DType dtype, int64_t place) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(numbers)[place];
    case DType::kF16:
      return to_float(static_cast<const __half*>(numbers)[place]);
    case DType::kBF16:
      return to_float(static_cast<const __nv_bfloat16*>(numbers)[place]);
  }
  return 0.0f;
}

__device__ inline float scale_at(const StoredRow& row, int64_t place) {
  return number_at(row.scales, row.scale_dtype, place);
}

__device__ inline int64_t scale_place(const StoredRow& row, int64_t column) {
  return static_cast<uint32_t>(column) / static_cast<uint32_t>(row.scale_columns);
}

// e4m3: with sign, exponent and mantissa where a float has them, the number is 2^-120 times itself,
// subnormal ones included.
__device__ inline float e4m3_as_float(uint32_t bits) {
  return __uint_as_float((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
}

// Of four e2m1 numbers in 16 bits: 12 + twice each, a byte each.
__device__ inline uint32_t four_e2m1(uint32_t bits) {
  const uint32_t positive = __byte_perm(0x0f0e0d0c, 0x18141210, bits & 0x7777);
  const uint32_t negative = 0x18181818 - positive;
  const uint32_t is_negative = __byte_perm(0xff00, 0, bits >> 3 & 0x1111);
  return (positive & ~is_negative) | (negative & is_negative);
}

// Half the scale of a block of e2m1 numbers: codes are twice the numbers.
template <WeightFormat kFormat>
__device__ inline float half_scale(const StoredRow& row, int64_t place) {
  const uint32_t bits = static_cast<const uint8_t*>(row.scales)[place];
  const float scale = kFormat == WeightFormat::kNvFp4
                          ? e4m3_as_float(bits)
                          : __uint_as_float(max(bits << 23, 1u << 22));  // 2^-127 is subnormal
  return __fdiv_rn(0.5f * scale, row.divisor);
}

// Scale and offset of group `i` of a block of Q4_K and Q5_K (cpu/simd/formats.h).
__device__ inline float2 scale_of_k(const uint8_t* block, int i) {
  const uint8_t* const packed = block + 4;
  const int low = i & 3;
  const int scale = i < 4 ? packed[low] & 63 : (packed[low + 8] & 15) | (packed[low] >> 6 << 4);
  const int least =
      i < 4 ? packed[low + 4] & 63 : (packed[low + 8] >> 4) | (packed[low + 4] >> 6 << 4);
  return {half_at(block) * static_cast<float>(scale),
          -half_at(block + 2) * static_cast<float>(least)};
}

// Columns c .. c + 7 of a row of blocks; c is a multiple of 8. kEven: they lie at even addresses.
template <WeightFormat kFormat, bool kEven>
__device__ inline StoredPack load_stored(const StoredRow& row, int64_t c) {
  constexpr BlockLayout kLayout = block_layout(kFormat);
  const uint8_t* const block = row.data + c / kLayout.columns * kLayout.bytes;
  const int at = static_cast<int>(c % kLayout.columns);
  if constexpr (kFormat == WeightFormat::kInt4) {
    const int64_t place = scale_place(row, c);
    const uint32_t pairs = static_cast<uint32_t>(load_codes<kEven, 4>(block + at / 2)),
                   even = pairs & 0x0f0f0f0fu, odd = pairs >> 4 & 0x0f0f0f0fu;
    const uint64_t codes = __byte_perm(even, odd, 0x5140) |
                           static_cast<uint64_t>(__byte_perm(even, odd, 0x7362)) << 32;
    if (row.offsets != nullptr)
      return {codes, 0.0f, scale_at(row, place), number_at(row.offsets, row.scale_dtype, place)};
    const float zero = row.zeros == nullptr ? 8.0f : row.zeros[place];
    return {codes, zero, scale_at(row, place), 0.0f};
  } else if constexpr (kFormat == WeightFormat::kInt8) {
    return {load_codes<kEven>(block + at), 128.0f, scale_at(row, scale_place(row, c)), 0.0f};
  } else if constexpr (is_fp4(kFormat)) {
    const uint8_t* const pairs = block + at / 2;
    const uint64_t low = four_e2m1(pairs[0] | pairs[1] << 8);
    const uint64_t high = four_e2m1(pairs[2] | pairs[3] << 8);
    return {low | high << 32, 12.0f, half_scale<kFormat>(row, c / kLayout.columns), 0.0f};
  } else if constexpr (kFormat == WeightFormat::kQ4_0) {
    const uint64_t codes = load_codes<kEven>(block + 2 + at % 16);
    return {four_bits(codes, at >= 16), 8.0f, half_at(block), 0.0f};
  } else if constexpr (kFormat == WeightFormat::kQ4_1) {
    const uint64_t codes = load_codes<kEven>(block + 4 + at % 16);
    return {four_bits(codes, at >= 16), 0.0f, half_at(block), half_at(block + 2)};
  } else if constexpr (kFormat == WeightFormat::kQ5_0) {
    const uint64_t codes = load_codes<kEven>(block + 6 + at % 16);
    const uint64_t fifth = sixteen_where(block[2 + at / 8]);
    return {four_bits(codes, at >= 16) | fifth, 16.0f, half_at(block), 0.0f};
  } else if constexpr (kFormat == WeightFormat::kQ5_1) {
    const uint64_t codes = load_codes<kEven>(block + 8 + at % 16);
    const uint64_t fifth = sixteen_where(block[4 + at / 8]);
    return {four_bits(codes, at >= 16) | fifth, 0.0f, half_at(block), half_at(block + 2)};
  } else if constexpr (kFormat == WeightFormat::kQ8_0) {
    const uint64_t codes = load_codes<kEven>(block + 2 + at);
    return {codes ^ 128 * kEachByte, 128.0f, half_at(block), 0.0f};
  } else if constexpr (kFormat == WeightFormat::kQ4K) {
    const float2 of = scale_of_k(block, at / 32);
    const uint64_t codes = load_codes<kEven>(block + 16 + at / 64 * 32 + at % 32);
    return {four_bits(codes, at / 32 % 2 != 0), 0.0f, of.x, of.y};
  } else if constexpr (kFormat == WeightFormat::kQ5K) {
    const float2 of = scale_of_k(block, at / 32);
    const uint64_t codes = load_codes<kEven>(block + 48 + at / 64 * 32 + at % 32);
    const uint64_t fifth = load_codes<kEven>(block + 16 + at % 32) >> (at / 32) & kEachByte;
    return {four_bits(codes, at / 32 % 2 != 0) | fifth << 4, 0.0f, of.x, of.y};
  } else {
    static_assert(kFormat == WeightFormat::kQ6K);
    const int group = at / 32 % 4;
    const uint64_t codes = load_codes<kEven>(block + at / 128 * 64 + group % 2 * 32 + at % 32);
    const uint64_t high = load_codes<kEven>(block + 128 + at / 128 * 32 + at % 32);
    const uint64_t two = high >> (2 * group) & 3 * kEachByte;
    const float scale = static_cast<float>(static_cast<int8_t>(block[192 + at / 16]));
    return {four_bits(codes, group >= 2) | two << 4, 32.0f, half_at(block + 208) * scale, 0.0f};
  }
}

// Columns c .. c + 7 of a row of fp8, of which `count` are there. kVector: they lie at a multiple
// of eight bytes, and all are there.
template <bool kVector>
__device__ inline StoredPack load_fp8(const StoredRow& row, int64_t c, int64_t count) {
  const float scale = scale_at(row, scale_place(row, c));
  if constexpr (kVector)
    return {*reinterpret_cast<const uint64_t*>(row.data + c), 0.0f, scale, 0.0f};
  return {load_codes<false>(row.data + c, count), 0.0f, scale, 0.0f};
}

template <bool kFp8>
__device__ inline void decode(const StoredPack& pack, float (&out)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const uint32_t code = static_cast<uint32_t>(pack.codes >> (8 * i)) & 255;
    if constexpr (kFp8) {
      out[i] = e4m3_as_float(code) * pack.scale;
    } else {
      out[i] = fmaf(static_cast<float>(code) - pack.zero, pack.scale, pack.offset);
    }
  }
}

// load_stored() of any format of blocks, whose numbers all decode alike. It is no part of whoever
// calls it: there are many kernels of linears.
template <bool kEven>
__device__ __noinline__ StoredPack load_block(StoredRow row, int64_t c) {
  switch (row.format) {
    case WeightFormat::kDense:
    case WeightFormat::kFp8:
      break;
    case WeightFormat::kInt4:
      return load_stored<WeightFormat::kInt4, kEven>(row, c);
    case WeightFormat::kInt8:
      return load_stored<WeightFormat::kInt8, kEven>(row, c);
    case WeightFormat::kMxFp4:
      return load_stored<WeightFormat::kMxFp4, kEven>(row, c);
    case WeightFormat::kNvFp4:
      return load_stored<WeightFormat::kNvFp4, kEven>(row, c);
    case WeightFormat::kQ4_0:
      return load_stored<WeightFormat::kQ4_0, kEven>(row, c);
    case WeightFormat::kQ4_1:
      return load_stored<WeightFormat::kQ4_1, kEven>(row, c);
    case WeightFormat::kQ5_0:
      return load_stored<WeightFormat::kQ5_0, kEven>(row, c);
    case WeightFormat::kQ5_1:
      return load_stored<WeightFormat::kQ5_1, kEven>(row, c);
    case WeightFormat::kQ8_0:
      return load_stored<WeightFormat::kQ8_0, kEven>(row, c);
    case WeightFormat::kQ4K:
      return load_stored<WeightFormat::kQ4K, kEven>(row, c);
    case WeightFormat::kQ5K:
      return load_stored<WeightFormat::kQ5K, kEven>(row, c);
    case WeightFormat::kQ6K:
      return load_stored<WeightFormat::kQ6K, kEven>(row, c);
  }
  return {};
}

// out [k] = the numbers of a row, eight for each thread of a CTA in turn.
template <typename T>
__device__ inline void write_numbers(T* out, const StoredRow& row, int64_t k, int threads) {
  const bool is_fp8 = row.format == WeightFormat::kFp8;
  for (int64_t i = threadIdx.x * kPack; i < k; i += threads * kPack) {
    const int64_t count = k - i;
    float numbers[kPack];
    if (is_fp8) {
      decode<true>(load_fp8<false>(row, i, count), numbers);
    } else {
      decode<false>(load_block<false>(row, i), numbers);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j < count) out[i + j] = from_float<T>(numbers[j]);
    }
  }
}

template <typename T>
__device__ inline void store_numbers(T* out, const float (&numbers)[kPack]) {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < kPack; ++j) pack.e[j] = from_float<T>(numbers[j]);
  *reinterpret_cast<Pack<T>*>(out) = pack;
}

// The same where out is of whole 16-byte vectors, k of packs, and rows of codes are too (fp8), or
// begin at even addresses.
template <typename T>
__device__ inline void write_packs(T* out, const StoredRow& row, int64_t k, int threads) {
  constexpr int kAtOnce = 4;
  const bool is_fp8 = row.format == WeightFormat::kFp8;
  const int64_t step = static_cast<int64_t>(threads) * kPack;
  for (int64_t first = threadIdx.x * kPack; first < k; first += kAtOnce * step) {
    StoredPack packs[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t column = min(first + j * step, k - kPack);
      packs[j] = is_fp8 ? load_fp8<true>(row, column, kPack) : load_block<true>(row, column);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float numbers[kPack];
      if (is_fp8) {
        decode<true>(packs[j], numbers);
      } else {
        decode<false>(packs[j], numbers);
      }
      if (first + j * step < k) store_numbers(out + first + j * step, numbers);
    }
  }
}

}  // namespace photon::cuda
