// How the rows of each weight format become float32 numbers, sixteen at a time: the load stage of
// linears, and what an embedding reads. All formats are little endian, as the machines are.
#pragma once
#include "common/weight.h"
#include "cpu/simd/dot.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

// --- parts of a block
// -----------------------------------------------------------------------------

typedef uint8_t Codes __attribute__((vector_size(kLanes)));
typedef uint64_t Words __attribute__((vector_size(kLanes)));

template <typename T>
PHOTON_INLINE T read_as(const uint8_t* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

PHOTON_INLINE float half_at(const uint8_t* from) {
#if defined(__F16C__)
  return _cvtsh_ss(read_as<uint16_t>(from));
#else
  return widen(F16{}, HalfPart{} + read_as<uint16_t>(from))[0];
#endif
}

PHOTON_INLINE Lanes as_lanes(Codes codes) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_maskz_cvtepu8_epi32(0xffff, bit_cast<__m128i>(codes));
  return {{FloatPart(_mm512_maskz_cvtepi32_ps(0xffff, wide))}};
#elif defined(__AVX2__)
  const __m128i low = bit_cast<__m128i>(codes), high = _mm_srli_si128(low, 8);
  return {{FloatPart(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low))),
           FloatPart(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)))}};
#else
  Lanes lanes;
  PHOTON_UNROLL
  for (int i = 0; i < kLanes; ++i) lanes.part[i / kWidth][i % kWidth] = codes[i];
  return lanes;
#endif
}

PHOTON_INLINE Codes low_four(Codes bytes) { return bytes & 15; }
PHOTON_INLINE Codes high_four(Codes bytes) { return bytes >> 4; }

// 16 in lanes whose bit is set. A byte whose bit is alone in it, or is not there, carries into its
// highest bit with 127.
PHOTON_INLINE Codes sixteen_where(uint16_t bits) {
  constexpr uint64_t kEach = 0x0101010101010101, kOwn = 0x8040201008040201;
  const Words spread = Words{(bits & 255) * kEach, (bits >> 8) * kEach} & kOwn;
  return bit_cast<Codes>((spread + 127 * kEach) >> 3 & 16 * kEach);
}

// Two codes a byte, the first in the low bits: 0 .. 15, and the others.
struct CodePair {
  Codes first, second;
};

PHOTON_INLINE CodePair in_order(Codes bytes) {
  const Codes even = low_four(bytes), odd = high_four(bytes);
#if defined(__clang__)
  return {
      __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
      __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                              31)};
#else
  return {
      __builtin_shuffle(even, odd, Codes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}),
      __builtin_shuffle(even, odd,
                        Codes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})};
#endif
}

// Twice the e2m1 number of each four bits.
PHOTON_INLINE Lanes twice_e2m1(Codes codes) {
  constexpr Codes kPlus12 = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX2__)
  codes = bit_cast<Codes>(_mm_shuffle_epi8(bit_cast<__m128i>(kPlus12), bit_cast<__m128i>(codes)));
#else
  PHOTON_UNROLL
  for (int i = 0; i < kLanes; ++i) codes[i] = kPlus12[codes[i]];
#endif
  return as_lanes(codes) - splat(12.0f);
}

// --- blocks of GGUF files: put(i, the numbers of columns i .. i + 15)
// -----------------------------

struct Q4_0 {
  static constexpr int64_t kColumns = 32, kBytes = 18;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const Lanes scale = splat(half_at(block)), offset = splat(-8.0f * half_at(block));
    const Codes codes = read_as<Codes>(block + 2);
    put(0, fma(as_lanes(low_four(codes)), scale, offset));
    put(16, fma(as_lanes(high_four(codes)), scale, offset));
  }
};

struct Q4_1 {
  static constexpr int64_t kColumns = 32, kBytes = 20;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const Lanes scale = splat(half_at(block)), least = splat(half_at(block + 2));
    const Codes codes = read_as<Codes>(block + 4);
    put(0, fma(as_lanes(low_four(codes)), scale, least));
    put(16, fma(as_lanes(high_four(codes)), scale, least));
  }
};

struct Q5_0 {
  static constexpr int64_t kColumns = 32, kBytes = 22;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const Lanes scale = splat(half_at(block)), offset = splat(-16.0f * half_at(block));
    const Codes codes = read_as<Codes>(block + 6);
    const Codes low = sixteen_where(read_as<uint16_t>(block + 2));
    const Codes high = sixteen_where(read_as<uint16_t>(block + 4));
    put(0, fma(as_lanes(low_four(codes) | low), scale, offset));
    put(16, fma(as_lanes(high_four(codes) | high), scale, offset));
  }
};

struct Q5_1 {
  static constexpr int64_t kColumns = 32, kBytes = 24;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const Lanes scale = splat(half_at(block)), least = splat(half_at(block + 2));
    const Codes codes = read_as<Codes>(block + 8);
    const Codes low = sixteen_where(read_as<uint16_t>(block + 4));
    const Codes high = sixteen_where(read_as<uint16_t>(block + 6));
    put(0, fma(as_lanes(low_four(codes) | low), scale, least));
    put(16, fma(as_lanes(high_four(codes) | high), scale, least));
  }
};

struct Q8_0 {
  static constexpr int64_t kColumns = 32, kBytes = 34;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const Lanes scale = splat(half_at(block)), offset = splat(-128.0f * half_at(block));
    PHOTON_UNROLL
    for (int i = 0; i < 32; i += kLanes)
      put(i, fma(as_lanes(read_as<Codes>(block + 2 + i) ^ 128), scale, offset));
  }
};

// Of 32 columns of Q4_K and Q5_K: number = code * scale - least.
struct ScaleAndLeast {
  Lanes scale, offset;
};

// Eight pairs of six bits in twelve bytes: the first four scales and four minima have the low bits
// of a byte each; of the others four bits are in the last four bytes, and two above those before.
PHOTON_INLINE ScaleAndLeast scale_of_k(const uint8_t* block, int i) {
  const uint8_t* const packed = block + 4;
  int scale, least;
  if (i < 4) {
    scale = packed[i] & 63;
    least = packed[i + 4] & 63;
  } else {
    scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
    least = (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
  }
  return {splat(half_at(block) * static_cast<float>(scale)),
          splat(-half_at(block + 2) * static_cast<float>(least))};
}

struct Q4K {
  static constexpr int64_t kColumns = 256, kBytes = 144;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    PHOTON_UNROLL
    for (int group = 0; group < 8; ++group) {  // one in the low bits, the next in the high ones
      const ScaleAndLeast of = scale_of_k(block, group);
      PHOTON_UNROLL
      for (int i = 0; i < 32; i += kLanes) {
        const Codes codes = read_as<Codes>(block + 16 + group / 2 * 32 + i);
        const Codes four = group % 2 == 0 ? low_four(codes) : high_four(codes);
        put(32 * group + i, fma(as_lanes(four), of.scale, of.offset));
      }
    }
  }
};

struct Q5K {
  static constexpr int64_t kColumns = 256, kBytes = 176;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    PHOTON_UNROLL
    for (int group = 0; group < 8; ++group) {
      const ScaleAndLeast of = scale_of_k(block, group);
      PHOTON_UNROLL
      for (int i = 0; i < 32; i += kLanes) {
        const Codes fifth = read_as<Codes>(block + 16 + i) >> group & 1;
        const Codes codes = read_as<Codes>(block + 48 + group / 2 * 32 + i);
        const Codes four = group % 2 == 0 ? low_four(codes) : high_four(codes);
        put(32 * group + i, fma(as_lanes(four | fifth << 4), of.scale, of.offset));
      }
    }
  }
};

// Four low bits of 256 columns, two high ones, sixteen scales of one byte, and what all of them are
// multiplied by.
struct Q6K {
  static constexpr int64_t kColumns = 256, kBytes = 210;

  template <typename Put>
  static PHOTON_INLINE void each(const uint8_t* block, const Put& put) {
    const float all = half_at(block + 208);
    PHOTON_UNROLL
    for (int i = 0; i < 256; i += kLanes) {
      const int half = i / 128, group = i / 32 % 4, at = i % 32;
      const Codes codes = read_as<Codes>(block + 64 * half + 32 * (group % 2) + at);
      const Codes four = group < 2 ? low_four(codes) : high_four(codes);
      const Codes two = read_as<Codes>(block + 128 + 32 * half + at) >> (2 * group) & 3;
      const float scale = all * static_cast<float>(static_cast<int8_t>(block[192 + i / kLanes]));
      put(i, (as_lanes(four | two << 4) - splat(32.0f)) * splat(scale));
    }
  }
};

// --- rows: read(row, begin, end, take) calls take(at, numbers, load) for the columns begin .. end
// of a row, sixteen at a time; `load` loads as many of x's. begin is a multiple of kDecoded.

constexpr int64_t kDecoded = 256;
constexpr int64_t kLineBytes = 64;  // of a cache

template <typename Block>
struct BlockRows {
  const uint8_t* data;
  int64_t stride;

  template <typename Take>
  PHOTON_INLINE void read(int64_t row, int64_t begin, int64_t end, const Take& take) const {
    static_assert(kDecoded % Block::kColumns == 0);
    const auto load_all = [](const auto* from) { return load(from); };
    const uint8_t* block = data + row * stride + begin / Block::kColumns * Block::kBytes;
    for (int64_t at = begin; at < end; at += Block::kColumns, block += Block::kBytes) {
      PHOTON_UNROLL
      for (int64_t line = 0; line < Block::kBytes; line += kLineBytes)
        prefetch(block, kStreamAheadBytes + line);
      Block::each(block, [&](int64_t i, const Lanes& numbers) { take(at + i, numbers, load_all); });
    }
  }
};

// Of weights with scales beside them.
struct ScaledRows {
  const uint8_t* data;
  int64_t stride, first;  // first: row 0 here, in the weight
  WeightScales scales;

  PHOTON_INLINE int64_t place(int64_t row, int64_t column) const {
    return (first + row) / scales.rows * scales.stride + column / scales.columns;
  }
  PHOTON_INLINE float scale(int64_t place) const { return number(scales.data, place); }
  PHOTON_INLINE float offset(int64_t place) const { return number(scales.offsets, place); }

 private:
  PHOTON_INLINE float number(const void* from, int64_t place) const {
    switch (scales.dtype) {
      case DType::kF32:
        return static_cast<const float*>(from)[place];
      case DType::kF16:
        return half_at(static_cast<const uint8_t*>(from) + 2 * place);
      case DType::kBF16:
        return bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(from)[place])
                               << 16);
    }
    return 0.0f;
  }
};

struct Fp8Rows : ScaledRows {
  template <typename Take>
  PHOTON_INLINE void read(int64_t row, int64_t begin, int64_t end, const Take& take) const {
    const E4M3* const codes = reinterpret_cast<const E4M3*>(data + row * stride);
    static_assert(kDecoded % kScaleBlock == 0);
    for (int64_t from = begin; from < end; from += kScaleBlock) {
      const Lanes factor = splat(scale(place(row, from)));
      for (int64_t line = 0; line < kScaleBlock; line += kLineBytes)
        prefetch(codes, from + line + kStreamAheadBytes);
      for_lanes(end - from < kScaleBlock ? end - from : kScaleBlock,
                [&](int64_t i, auto load, auto) {
                  take(from + i, load(codes + from + i) * factor, load);
                });
    }
  }
};

struct Int4Rows : ScaledRows {
  template <typename Take>
  PHOTON_INLINE void read(int64_t row, int64_t begin, int64_t end, const Take& take) const {
    constexpr int64_t kColumns = 2 * kLanes;
    const auto load_all = [](const auto* from) { return load(from); };
    const uint8_t* const bytes = data + row * stride;
    for (int64_t at = begin; at < end; at += kColumns) {
      const int64_t group = place(row, at);
      prefetch(bytes, at / 2 + kStreamAheadBytes);
      const Lanes factor = splat(scale(group));
      const CodePair codes = in_order(read_as<Codes>(bytes + at / 2));
      if (scales.offsets != nullptr) {
        const Lanes least = splat(offset(group));
        take(at, fma(as_lanes(codes.first), factor, least), load_all);
        take(at + kLanes, fma(as_lanes(codes.second), factor, least), load_all);
        continue;
      }
      const Lanes zero = splat(scales.zeros == nullptr ? 8.0f : scales.zeros[group]);
      take(at, (as_lanes(codes.first) - zero) * factor, load_all);
      take(at + kLanes, (as_lanes(codes.second) - zero) * factor, load_all);
    }
  }
};

struct Int8Rows : ScaledRows {
  template <typename Take>
  PHOTON_INLINE void read(int64_t row, int64_t begin, int64_t end, const Take& take) const {
    const auto load_all = [](const auto* from) { return load(from); };
    const uint8_t* const bytes = data + row * stride;
    for (int64_t at = begin; at < end; at += kLanes) {
      if (at % kLineBytes == 0) prefetch(bytes, at + kStreamAheadBytes);
      const Lanes codes = as_lanes(read_as<Codes>(bytes + at)) - splat(128.0f);
      take(at, codes * splat(scale(place(row, at))), load_all);
    }
  }
};

struct MxFp4 {
  static constexpr int64_t kColumns = 32;  // of a block

  static PHOTON_INLINE Codes codes(const uint8_t* bytes) { return read_as<Codes>(bytes); }
  // Of so many blocks, at most sixteen.
  static PHOTON_INLINE Lanes scales(const uint8_t* bytes, int64_t count) {
    float scales[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bytes[i];
      scales[i] = bit_cast<float>(bits == 0 ? 1u << 22 : bits << 23);
    }
    return load(scales);
  }
};

struct NvFp4 {
  static constexpr int64_t kColumns = 16;

  static PHOTON_INLINE Codes codes(const uint8_t* bytes) {
    return bit_cast<Codes>(Words{read_as<uint64_t>(bytes), 0});
  }
  static PHOTON_INLINE Lanes scales(const uint8_t* bytes, int64_t count) {
    const E4M3* const numbers = reinterpret_cast<const E4M3*>(bytes);
    return count == kLanes ? load(numbers) : load_some(numbers, count);
  }
};

template <typename Format>
struct Fp4Rows : ScaledRows {
  template <typename Take>
  PHOTON_INLINE void read(int64_t row, int64_t begin, int64_t end, const Take& take) const {
    constexpr int64_t kColumns = Format::kColumns;
    static_assert(kDecoded % kColumns == 0);
    const auto load_all = [](const auto* from) { return load(from); };
    const uint8_t* bytes = data + row * stride + begin / 2;
    const uint8_t* scale =
        static_cast<const uint8_t*>(scales.data) + (first + row) * scales.stride + begin / kColumns;
    const Lanes divisor = splat(scales.divisors == nullptr ? 1.0f : scales.divisors[first + row]);
    for (int64_t from = begin; from < end; from += kLanes * kColumns, scale += kLanes) {
      const int64_t left = (end - from) / kColumns, blocks = left < kLanes ? left : kLanes;
      float halves[kLanes];  // of scales
      store(halves, Format::scales(scale, blocks) * splat(0.5f) / divisor);
      for (int64_t i = 0; i < blocks; ++i, bytes += kColumns / 2) {
        const int64_t at = from + i * kColumns;
        const Lanes factor = splat(halves[i]);
        prefetch(bytes, kStreamAheadBytes);
        const CodePair codes = in_order(Format::codes(bytes));
        take(at, twice_e2m1(codes.first) * factor, load_all);
        if constexpr (kColumns > kLanes)
          take(at + kLanes, twice_e2m1(codes.second) * factor, load_all);
      }
    }
  }
};

// Calls body with the rows of a weight that is not dense, from row `first` on.
template <typename Body>
PHOTON_INLINE void with_rows(const Weight& w, int64_t first, const Body& body) {
  const uint8_t* const data = static_cast<const uint8_t*>(w.data) + first * w.stride;
  const ScaledRows scaled = {data, w.stride, first, w.scales};
  switch (w.format) {
    case WeightFormat::kDense:
      return;
    case WeightFormat::kFp8:
      return body(Fp8Rows{scaled});
    case WeightFormat::kInt4:
      return body(Int4Rows{scaled});
    case WeightFormat::kInt8:
      return body(Int8Rows{scaled});
    case WeightFormat::kMxFp4:
      return body(Fp4Rows<MxFp4>{scaled});
    case WeightFormat::kNvFp4:
      return body(Fp4Rows<NvFp4>{scaled});
    case WeightFormat::kQ4_0:
      return body(BlockRows<Q4_0>{data, w.stride});
    case WeightFormat::kQ4_1:
      return body(BlockRows<Q4_1>{data, w.stride});
    case WeightFormat::kQ5_0:
      return body(BlockRows<Q5_0>{data, w.stride});
    case WeightFormat::kQ5_1:
      return body(BlockRows<Q5_1>{data, w.stride});
    case WeightFormat::kQ8_0:
      return body(BlockRows<Q8_0>{data, w.stride});
    case WeightFormat::kQ4K:
      return body(BlockRows<Q4K>{data, w.stride});
    case WeightFormat::kQ5K:
      return body(BlockRows<Q5K>{data, w.stride});
    case WeightFormat::kQ6K:
      return body(BlockRows<Q6K>{data, w.stride});
  }
}

}  // namespace
}  // namespace photon::cpu::PHOTON_ISA
