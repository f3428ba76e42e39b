// CUDA's keywords, vector types and built-in variables.
#pragma once
#include <cstddef>
#include <cstdint>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks that share such a variable run one after another; the engine poisons the section before
// each.
#define __shared__ static __attribute__((section("photon_shared")))

#define PHOTON_VECTOR_TYPES(T, name)                                                 \
  struct name##1 { T x; };                                                           \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct name##3 { T x, y, z; };                                                     \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##1 make_##name##1(T x) { return {x}; }                                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

PHOTON_VECTOR_TYPES(signed char, char)
PHOTON_VECTOR_TYPES(unsigned char, uchar)
PHOTON_VECTOR_TYPES(short, short)
PHOTON_VECTOR_TYPES(unsigned short, ushort)
PHOTON_VECTOR_TYPES(int, int)
PHOTON_VECTOR_TYPES(unsigned, uint)
PHOTON_VECTOR_TYPES(long long, longlong)
PHOTON_VECTOR_TYPES(unsigned long long, ulonglong)
PHOTON_VECTOR_TYPES(float, float)
PHOTON_VECTOR_TYPES(double, double)
#undef PHOTON_VECTOR_TYPES

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#pragma GCC visibility push(hidden)
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
#pragma GCC visibility pop
constexpr int warpSize = 32;
