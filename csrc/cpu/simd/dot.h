// What linear and attention share: products of M tokens with N rows of another matrix, and sums.
#pragma once
#include "cpu/simd/lanes.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

// out[i] = the sum of acc[i]'s lanes.
template <int kCount>
PHOTON_INLINE void reduce(const Lanes* acc, float* out) {
  PHOTON_UNROLL
  for (int i = 0; i + 4 <= kCount; i += 4) {
    const Float4 four = sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    __builtin_memcpy(out + i, &four, sizeof(four));
  }
  PHOTON_UNROLL
  for (int i = kCount / 4 * 4; i < kCount; ++i) out[i] = sum(acc[i]);
}

// How far ahead of its place a single stream of weights is read: beyond what the hardware
// prefetcher covers.
constexpr int64_t kStreamAheadBytes = 8192;

// Calls an element into the cache, whether it exists or not.
template <typename T>
PHOTON_INLINE void prefetch(const T* from, int64_t at) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) +
                                                   static_cast<uintptr_t>(at) * sizeof(T)));
}

// out[i * N + j] = x[i * x_stride ...] . rows[j], over k elements. The rows' elements `ahead`
// further on are called into the cache.
template <typename T, int M, int N>
PHOTON_INLINE void dot_tile(const float* x, int64_t x_stride, const T* const (&rows)[N], int64_t k,
                            int64_t ahead, float* out) {
  Lanes acc[M * N];
  PHOTON_UNROLL
  for (int i = 0; i < M * N; ++i) acc[i] = splat(0.0f);
  int64_t at = 0;
  for (; at + kLanes <= k; at += kLanes) {
    Lanes b[N];
    PHOTON_UNROLL
    for (int j = 0; j < N; ++j) {
      prefetch(rows[j], at + ahead);
      b[j] = load(rows[j] + at);
    }
    PHOTON_UNROLL
    for (int i = 0; i < M; ++i) {
      const Lanes a = load(x + i * x_stride + at);
      PHOTON_UNROLL
      for (int j = 0; j < N; ++j) acc[i * N + j] = fma(a, b[j], acc[i * N + j]);
    }
  }
  if (at < k) {
    PHOTON_UNROLL
    for (int j = 0; j < N; ++j) {
      const Lanes b = load_some(rows[j] + at, k - at);
      PHOTON_UNROLL
      for (int i = 0; i < M; ++i)
        acc[i * N + j] = fma(load_some(x + i * x_stride + at, k - at), b, acc[i * N + j]);
    }
  }
  reduce<M * N>(acc, out);
}

}  // namespace
}  // namespace photon::cpu::PHOTON_ISA
