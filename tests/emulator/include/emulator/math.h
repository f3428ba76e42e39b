// Bit operations, memory hints and the maths of a device that the host's <cmath> lacks. Approximate
// intrinsics are exact here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulator {

template <typename To, typename From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulator

inline unsigned __float_as_uint(float v) { return emulator::bit_cast<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::bit_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return emulator::bit_cast<float>(v); }
inline float __int_as_float(int v) { return emulator::bit_cast<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __clzll(long long v) {
  return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v));
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}

inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1u) << (31 - i);
  return reversed;
}

// Four bytes chosen from the eight of y:x, x being the lower. Of a selector's four bits the highest
// is not used (of PTX's prmt it is).
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = bytes >> 8 * (selectors >> 4 * i & 7u) & 0xffu;
    result |= byte << 8 * i;
  }
  return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31u));
}

inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v)));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline int __float2int_rd(float v) { return static_cast<int>(std::floor(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }

#define PHOTON_MIN_MAX(T)                             \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
PHOTON_MIN_MAX(int)
PHOTON_MIN_MAX(unsigned)
PHOTON_MIN_MAX(long)
PHOTON_MIN_MAX(unsigned long)
PHOTON_MIN_MAX(long long)
PHOTON_MIN_MAX(unsigned long long)
#undef PHOTON_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// --- loads and stores with a cache hint, which changes no value ----------------------------------

#define PHOTON_LOAD(name) \
  template <typename T>   \
  T name(const T* p) {    \
    return *p;            \
  }
PHOTON_LOAD(__ldg)
PHOTON_LOAD(__ldca)
PHOTON_LOAD(__ldcg)
PHOTON_LOAD(__ldcs)
PHOTON_LOAD(__ldlu)
PHOTON_LOAD(__ldcv)
#undef PHOTON_LOAD
#define PHOTON_STORE(name)                       \
  template <typename T>                          \
  void name(T* p, std::common_type_t<T> value) { \
    *p = value;                                  \
  }
PHOTON_STORE(__stwb)
PHOTON_STORE(__stcg)
PHOTON_STORE(__stcs)
PHOTON_STORE(__stwt)
#undef PHOTON_STORE
