// RMS norm of one token, as rms_norm computes it alone and norm_linear on the way: the squares are
// dealt to norm_threads(hidden) threads, each of which adds up its own in order; the threads' sums
// meet in warps, the warps' sums in one. Whoever plays these threads gets the same bits.
#pragma once
#include "common/host_device.h"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear/pair.cuh"

namespace photon::cuda {

constexpr int kMaxNormThreads = 1024;

// Whole warps, one pack a thread as far as they reach.
PHOTON_HOST_DEVICE inline int norm_threads(int64_t hidden) {
  constexpr int64_t kWarpElements = kWarpSize * kPack;
  const int64_t warps = (hidden + kWarpElements - 1) / kWarpElements;
  return static_cast<int>(warps * kWarpSize < kMaxNormThreads ? warps * kWarpSize
                                                              : kMaxNormThreads);
}

// The sum of squares of one of these threads. `load` returns the pack at an element of the token.
template <typename Load>
__device__ inline float sum_squares(const Load& load, int64_t hidden, int thread, int threads) {
  const int64_t step = static_cast<int64_t>(threads) * kPack;
  float squares = 0.0f;
  for (int64_t d = static_cast<int64_t>(thread) * kPack; d < hidden; d += step) {
    const auto pack = load(d);
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      const float2 v = to_floats(get_pair(pack, i));
      squares = fmaf(v.y, v.y, fmaf(v.x, v.x, squares));
    }
  }
  return squares;
}

__device__ inline float norm_scale(float squares, int64_t hidden, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(hidden) + eps);
}

// gain * round(x * scale), rounded.
template <typename T>
__device__ inline Pack<T> normalized(Pack<T> x, const Pack<T>& gain, float scale) {
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float2 v = to_floats(get_pair(x, i));
    set_pair(x, i, times(get_pair(gain, i), from_floats<T>(v.x * scale, v.y * scale)));
  }
  return x;
}

}  // namespace photon::cuda
