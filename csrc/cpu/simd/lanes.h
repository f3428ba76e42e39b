// Sixteen float32 lanes, the unit in which every ISA computes: the same accumulator layout and the
// same reduction tree whatever the width of the machine's registers. Included by the files of this
// folder only, which the build compiles once per ISA: everything here has internal linkage, so that
// no AVX-512 copy of a function can stand in for a baseline one.
#pragma once
#include <cstdint>

#include "common/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef PHOTON_ISA
#define PHOTON_ISA baseline
#endif

#if defined(__clang__)
#define PHOTON_UNROLL _Pragma("unroll")
#define PHOTON_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PHOTON_UNROLL _Pragma("GCC unroll 32")
#define PHOTON_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Int4{i, j, k, l})
#endif

#define PHOTON_INLINE inline __attribute__((always_inline))

namespace photon::cpu::PHOTON_ISA {
namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;

typedef float FloatPart __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntPart __attribute__((vector_size(kWidth * 4)));
typedef uint32_t WordPart __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(kWidth * 2)));
typedef int8_t BytePart __attribute__((vector_size(kWidth)));
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

// Lane l is part[l / kWidth][l % kWidth].
struct Lanes {
  FloatPart part[kParts];
};

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct E4M3 {
  uint8_t bits;
};

template <typename To, typename From>
PHOTON_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Function>
PHOTON_INLINE Lanes each_part(const Function& function) {
  Lanes out;
  PHOTON_UNROLL
  for (int p = 0; p < kParts; ++p) out.part[p] = function(p);
  return out;
}

PHOTON_INLINE Lanes splat(float value) {
  return each_part([&](int) { return FloatPart{} + value; });
}
PHOTON_INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
  return each_part([&](int p) { return a.part[p] + b.part[p]; });
}
PHOTON_INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
  return each_part([&](int p) { return a.part[p] - b.part[p]; });
}
PHOTON_INLINE Lanes operator*(const Lanes& a, const Lanes& b) {
  return each_part([&](int p) { return a.part[p] * b.part[p]; });
}
PHOTON_INLINE Lanes operator/(const Lanes& a, const Lanes& b) {
  return each_part([&](int p) { return a.part[p] / b.part[p]; });
}
PHOTON_INLINE Lanes max(const Lanes& a, const Lanes& b) {
  return each_part([&](int p) { return a.part[p] > b.part[p] ? a.part[p] : b.part[p]; });
}

// a * b + c; fused where the ISA can. Written out, so that no two instantiations are contracted
// differently.
PHOTON_INLINE FloatPart fma(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return FloatPart(_mm512_fmadd_ps(a, b, c));
#elif defined(__FMA__)
  return FloatPart(_mm256_fmadd_ps(a, b, c));
#else
  return a * b + c;
#endif
}
PHOTON_INLINE Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return each_part([&](int p) { return fma(a.part[p], b.part[p], c.part[p]); });
}

// --- reductions: lanes i and i + 8, then i and i + 4, + 2, + 1 -----------------------------------

PHOTON_INLINE Float4 fold(const Lanes& a) {
#if defined(__AVX512F__)
  const __m256 eight = _mm512_maskz_extractf32x8_ps(0xff, a.part[0], 0) +
                       _mm512_maskz_extractf32x8_ps(0xff, a.part[0], 1);
  return Float4(_mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
  const __m256 eight = a.part[0] + a.part[1];
  return Float4(_mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1));
#else
  return (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
#endif
}

// The sums of four vectors at once, each by the tree above.
PHOTON_INLINE Float4 sum4(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
  const Float4 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  const Float4 ab = PHOTON_SHUFFLE(fa, fb, 0, 1, 4, 5) + PHOTON_SHUFFLE(fa, fb, 2, 3, 6, 7);
  const Float4 cd = PHOTON_SHUFFLE(fc, fd, 0, 1, 4, 5) + PHOTON_SHUFFLE(fc, fd, 2, 3, 6, 7);
  return PHOTON_SHUFFLE(ab, cd, 0, 2, 4, 6) + PHOTON_SHUFFLE(ab, cd, 1, 3, 5, 7);
}

PHOTON_INLINE float sum(const Lanes& a) {
  const Float4 four = fold(a);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

PHOTON_INLINE float max_lane(const Lanes& a) {
  float best = a.part[0][0];
  PHOTON_UNROLL
  for (int i = 1; i < kLanes; ++i) {
    const float lane = a.part[i / kWidth][i % kWidth];
    best = lane > best ? lane : best;
  }
  return best;
}

// --- half formats; rounding is to nearest even ---------------------------------------------------

// Intrinsics where GCC 12 makes four instructions of the plain conversion; their zero-masked forms,
// because it takes the undefined operand of the others for an uninitialized variable.
PHOTON_INLINE WordPart zero_extend(HalfPart bits) {
#if defined(__AVX512F__)
  return bit_cast<WordPart>(_mm512_maskz_cvtepu16_epi32(0xffff, bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  return bit_cast<WordPart>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, WordPart);
#endif
}

PHOTON_INLINE FloatPart widen(BF16, HalfPart bits) {
  return bit_cast<FloatPart>(zero_extend(bits) << 16);
}

PHOTON_INLINE HalfPart narrow(BF16, FloatPart value) {
  const WordPart bits = bit_cast<WordPart>(value);
  const WordPart rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordPart nan = {};
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan + 0x7fc0u : rounded,
                                 HalfPart);
}

#if defined(__AVX512F__)
PHOTON_INLINE FloatPart widen(F16, HalfPart bits) {
  return FloatPart(_mm512_maskz_cvtph_ps(0xffff, bit_cast<__m256i>(bits)));
}
PHOTON_INLINE HalfPart narrow(F16, FloatPart value) {
  return bit_cast<HalfPart>(
      _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
PHOTON_INLINE FloatPart widen(F16, HalfPart bits) {
  return FloatPart(_mm256_cvtph_ps(bit_cast<__m128i>(bits)));
}
PHOTON_INLINE HalfPart narrow(F16, FloatPart value) {
  return bit_cast<HalfPart>(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// Exponents are re-biased by a multiplication with 2^112, which also normalizes subnormals;
// infinities and NaN keep exponent 255.
PHOTON_INLINE FloatPart widen(F16, HalfPart half) {
  const WordPart bits = zero_extend(half);
  const WordPart magnitude = (bits & 0x7fffu) << 13;
  const WordPart scaled = bit_cast<WordPart>(bit_cast<FloatPart>(magnitude) * 0x1p112f);
  const WordPart special = magnitude | 0x7f800000u;
  return bit_cast<FloatPart>((magnitude >= (0x7c00u << 13) ? special : scaled) |
                             ((bits & 0x8000u) << 16));
}

PHOTON_INLINE HalfPart narrow(F16, FloatPart value) {
  const WordPart bits = bit_cast<WordPart>(value), magnitude = bits & 0x7fffffffu;
  const WordPart normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the half's unit is 2^-24: adding 0.5 in float32 leaves the rounded count of units
  // in the low mantissa bits.
  const WordPart subnormal =
      bit_cast<WordPart>(bit_cast<FloatPart>(magnitude) + 0.5f) - 0x3f000000u;
  const WordPart zero = {}, infinity = zero + 0x7c00u, nan = zero + 0x7e00u;
  WordPart half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? infinity : half;  // 65520 and above round to infinity
  half = magnitude > 0x7f800000u ? nan : half;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), HalfPart);
}
#endif

// With the sign in bit 15, the exponent's four bits where a half has its last four, and the
// mantissa behind, an e4m3 is a half 2^-8 times as large, subnormal ones included.
PHOTON_INLINE FloatPart widen(E4M3, BytePart bits) {
#if defined(__AVX512F__)
  const HalfPart extended = bit_cast<HalfPart>(_mm256_cvtepi8_epi16(bit_cast<__m128i>(bits)));
#elif defined(__AVX2__)
  const HalfPart extended =
      bit_cast<HalfPart>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(bit_cast<int64_t>(bits))));
#else
  const HalfPart extended = __builtin_convertvector(bits, HalfPart);
#endif
  return widen(F16{}, (extended << 7) & static_cast<uint16_t>(0xbfff)) * 0x1p8f;
}

// --- memory --------------------------------------------------------------------------------------

PHOTON_INLINE FloatPart load_part(const float* from) {
  FloatPart part;
  __builtin_memcpy(&part, from, sizeof(part));
  return part;
}

template <typename T>
PHOTON_INLINE FloatPart load_part(const T* from) {
  HalfPart bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return widen(T{}, bits);
}

PHOTON_INLINE FloatPart load_part(const E4M3* from) {
  BytePart bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return widen(E4M3{}, bits);
}

template <typename T>
PHOTON_INLINE Lanes load(const T* from) {
  return each_part([&](int p) { return load_part(from + p * kWidth); });
}

PHOTON_INLINE void store(float* to, const Lanes& value) {
  PHOTON_UNROLL
  for (int p = 0; p < kParts; ++p)
    __builtin_memcpy(to + p * kWidth, &value.part[p], sizeof(value.part[p]));
}

template <typename T>
PHOTON_INLINE void store(T* to, const Lanes& value) {
  PHOTON_UNROLL
  for (int p = 0; p < kParts; ++p) {
    const HalfPart bits = narrow(T{}, value.part[p]);
    __builtin_memcpy(to + p * kWidth, &bits, sizeof(bits));
  }
}

// The first `count` elements, 0 <= count <= 16; the other lanes are zero.
template <typename T>
PHOTON_INLINE Lanes load_some(const T* from, int64_t count) {
  T buffer[kLanes] = {};
  __builtin_memcpy(buffer, from, static_cast<size_t>(count) * sizeof(T));
  return load(buffer);
}

template <typename T>
PHOTON_INLINE void store_some(T* to, const Lanes& value, int64_t count) {
  T buffer[kLanes];
  store(buffer, value);
  __builtin_memcpy(to, buffer, static_cast<size_t>(count) * sizeof(T));
}

PHOTON_INLINE Lanes rounded_to(const float*, const Lanes& value) { return value; }

template <typename T>
PHOTON_INLINE Lanes rounded_to(const T*, const Lanes& value) {
  return each_part([&](int p) { return widen(T{}, narrow(T{}, value.part[p])); });
}

// Calls body(offset, load, store) over 0 .. n, sixteen lanes at a time, the last call with the
// remainder; `load` and `store` move that many elements of a pointer plus offset.
template <typename Body>
PHOTON_INLINE void for_lanes(int64_t n, const Body& body) {
  const auto load_all = [](const auto* from) { return load(from); };
  const auto store_all = [](auto* to, const Lanes& value) { store(to, value); };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, load_all, store_all);
  if (i < n) {
    const int64_t rest = n - i;
    body(
        i, [rest](const auto* from) { return load_some(from, rest); },
        [rest](auto* to, const Lanes& value) { store_some(to, value, rest); });
  }
}

// Calls body with a value of the element type.
template <typename Body>
PHOTON_INLINE void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(float{});
    case DType::kF16:
      return body(F16{});
    case DType::kBF16:
      return body(BF16{});
  }
}

// --- e^x: x = n ln 2 + r with |r| <= ln 2 / 2, a degree-7 Taylor polynomial in r, and 2^n in two
// factors so that the ends of the range overflow to infinity and fade into subnormals as they
// should. About 1 ulp.
PHOTON_INLINE Lanes exp(const Lanes& value) {
  return each_part([&](int p) {
    const FloatPart zero = {};
    FloatPart x = value.part[p];
    x = x > 89.0f ? zero + 89.0f : x;  // comparisons with NaN are false: it stays
    x = x < -105.0f ? zero - 105.0f : x;
    const FloatPart shifted = x * 1.44269504088896341f +
                              12582912.0f;  // 1.5 * 2^23: the integer is in the low mantissa bits
    const IntPart n = bit_cast<IntPart>(shifted) - 0x4b400000;
    const FloatPart whole = shifted - 12582912.0f;
    const FloatPart r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    FloatPart y = zero + 1.0f / 5040.0f;
    y = y * r + 1.0f / 720.0f;
    y = y * r + 1.0f / 120.0f;
    y = y * r + 1.0f / 24.0f;
    y = y * r + 1.0f / 6.0f;
    y = y * r + 0.5f;
    y = (y * r) * r + r + 1.0f;
    const IntPart half = n >> 1;
    return y * bit_cast<FloatPart>((half + 127) << 23) *
           bit_cast<FloatPart>((n - half + 127) << 23);
  });
}

}  // namespace
}  // namespace photon::cpu::PHOTON_ISA
