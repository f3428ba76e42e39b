// One head through q/k norm and RoPE, by one warp. Lane i owns the pairs (i, i + D/2), (i + 32, i + 32 + D/2), ... that rotate together.
#pragma once
#include <cmath>

#include "common/params.h"
#include "cuda/element.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kMaxPairs = static_cast<int>(kMaxHeadDim) / 2 / kWarpSize;  // of one lane

template <typename T>
struct LanePairs {
  T low[kMaxPairs], high[kMaxPairs];

  // Both halves of the head as this lane holds them, written to out[0 .. head_dim).
  __device__ void store(T* out, int head_dim) const {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      const int i = threadIdx.x % kWarpSize + j * kWarpSize;
      if (i >= half) continue;
      out[i] = low[j];
      out[i + half] = high[j];
    }
  }
};

// RMS norm of a head whose values the warp holds, with transformers' roundings: weight * round(x * scale), rounded.
template <typename T>
__device__ inline void norm_head(float (&low)[kMaxPairs], float (&high)[kMaxPairs], const T* weight, float eps, int head_dim) {
  const int half = head_dim / 2;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) squares = fmaf(high[j], high[j], fmaf(low[j], low[j], squares));
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = threadIdx.x % kWarpSize + j * kWarpSize;
    if (i >= half) continue;
    low[j] = rounded<T>(to_float(weight[i]) * rounded<T>(low[j] * scale));
    high[j] = rounded<T>(to_float(weight[i + half]) * rounded<T>(high[j] * scale));
  }
}

// Norm (where `weight` is not null) and rotation in float32, rounded once to T. `position` is inside the tables.
template <typename T>
__device__ inline LanePairs<T> rotate_head(const T* x, const T* weight, const RopeParams& rope, int32_t position, int head_dim) {
  const int half = head_dim / 2;
  const float* cos = rope.cos + static_cast<int64_t>(position) * head_dim;
  const float* sin = rope.sin + static_cast<int64_t>(position) * head_dim;
  float low[kMaxPairs], high[kMaxPairs];
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = threadIdx.x % kWarpSize + j * kWarpSize;
    low[j] = i < half ? to_float(x[i]) : 0.0f;
    high[j] = i < half ? to_float(x[i + half]) : 0.0f;
  }
  if (weight != nullptr) norm_head(low, high, weight, rope.eps, head_dim);
  LanePairs<T> out = {};
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = threadIdx.x % kWarpSize + j * kWarpSize;
    if (i >= half) continue;
    out.low[j] = from_float<T>(fmaf(low[j], cos[i], -(high[j] * sin[i])));
    out.high[j] = from_float<T>(fmaf(high[j], cos[i + half], low[j] * sin[i + half]));
  }
  return out;
}

}  // namespace photon::cuda
