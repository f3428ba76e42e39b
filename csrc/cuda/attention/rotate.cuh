// One head through q/k norm and RoPE, by one warp. Lane i owns the pairs (i, i + D/2), (i + 32, i +
// 32 + D/2), ... that rotate together.
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

  // Zeros past the head's end, or all over if it is not `present`.
  __device__ static LanePairs load(const T* x, int head_dim, bool present = true) {
    const int half = head_dim / 2;
    LanePairs pairs;
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      const int i = threadIdx.x % kWarpSize + j * kWarpSize;
      pairs.low[j] = i < half && present ? x[i] : from_float<T>(0.0f);
      pairs.high[j] = i < half && present ? x[i + half] : from_float<T>(0.0f);
    }
    return pairs;
  }

  // Element by element, so that both stay in registers.
  __device__ void replace_if(bool condition, const LanePairs& other) {
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      low[j] = condition ? other.low[j] : low[j];
      high[j] = condition ? other.high[j] : high[j];
    }
  }

  // body(dim, element) for what this lane holds of the head.
  template <typename Body>
  __device__ void for_elements(int head_dim, const Body& body) const {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      const int i = threadIdx.x % kWarpSize + j * kWarpSize;
      if (i >= half) continue;
      body(i, low[j]);
      body(i + half, high[j]);
    }
  }

  __device__ void store(T* out, int head_dim) const {
    for_elements(head_dim, [&](int d, T element) { out[d] = element; });
  }
};

// The angles of a position, inside the tables, that turn a lane's pairs.
struct LaneCosSin {
  LanePairs<float> cos, sin;

  __device__ static LaneCosSin load(const RopeParams& rope, int32_t position, int head_dim) {
    const int64_t at = static_cast<int64_t>(position) * head_dim;
    return {LanePairs<float>::load(rope.cos + at, head_dim),
            LanePairs<float>::load(rope.sin + at, head_dim)};
  }
};

// RMS norm of a head whose values the warp holds, with transformers' roundings: weight * round(x *
// scale), rounded.
template <typename T>
__device__ inline void norm_head(float (&low)[kMaxPairs], float (&high)[kMaxPairs],
                                 const LanePairs<T>& weight, float eps, int head_dim) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j)
    squares = fmaf(high[j], high[j], fmaf(low[j], low[j], squares));
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    low[j] *= scale;
    high[j] *= scale;
    round_both<T>(low[j], high[j]);
    low[j] *= to_float(weight.low[j]);
    high[j] *= to_float(weight.high[j]);
    round_both<T>(low[j], high[j]);
  }
}

// Norm (where `normed`) and rotation in float32, rounded once to T.
template <typename T>
__device__ inline LanePairs<T> rotate_pairs(const LanePairs<T>& x, bool normed,
                                            const LanePairs<T>& weight, const LaneCosSin& angles,
                                            float eps, int head_dim) {
  float low[kMaxPairs], high[kMaxPairs];
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    low[j] = to_float(x.low[j]);
    high[j] = to_float(x.high[j]);
  }
  if (normed) norm_head(low, high, weight, eps, head_dim);
  LanePairs<T> out;
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    out.low[j] = from_float<T>(fmaf(low[j], angles.cos.low[j], -(high[j] * angles.sin.low[j])));
    out.high[j] = from_float<T>(fmaf(high[j], angles.cos.high[j], low[j] * angles.sin.high[j]));
  }
  return out;
}

// The same for a head in memory. `position` is inside the tables.
template <typename T>
__device__ inline LanePairs<T> rotate_head(const T* x, const T* weight, const RopeParams& rope,
                                           int32_t position, int head_dim) {
  return rotate_pairs(LanePairs<T>::load(x, head_dim), weight != nullptr,
                      LanePairs<T>::load(weight, head_dim, weight != nullptr),
                      LaneCosSin::load(rope, position, head_dim), rope.eps, head_dim);
}

}  // namespace photon::cuda
