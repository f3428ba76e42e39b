// spatial_features: a CTA for each token, a thread for each column. choose_value: a warp for each
// segment, which compares value and bin, so that the first of equals wins whatever the lanes.
#include "cuda/step/spatial.h"

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace {

constexpr int kFeatureThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kFeatureThreads)
    spatial_features_kernel(const SpatialFeaturesParams p) {
  const int64_t token = blockIdx.x;
  const SpatialValue value = spatial_value(p, token);
  T* const out = static_cast<T*>(p.out) + token * p.out_stride;
  for (int64_t column = threadIdx.x; column < p.width; column += kFeatureThreads)
    out[column] = from_float<T>(spatial_feature(p, value, column));
}

// The bin of the largest logit, the first of equals; -1: all are NaN or -inf. All lanes of the warp
// must call it, and get the same.
template <typename T>
__device__ inline int32_t likeliest_bin(const T* logits, int64_t bins) {
  float best = -INFINITY;
  int32_t bin = -1;
  for (int64_t i = threadIdx.x; i < bins; i += kWarpSize) {
    const float v = to_float(logits[i]);
    if (v > best) {
      best = v;
      bin = static_cast<int32_t>(i);
    }
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, best, offset);
    const int32_t other_bin = __shfl_xor_sync(kFullWarp, bin, offset);
    if (other > best || (other == best && other_bin >= 0 && (bin < 0 || other_bin < bin))) {
      best = other;
      bin = other_bin;
    }
  }
  return bin;
}

template <typename T>
__global__ void __launch_bounds__(kWarpSize) choose_value_kernel(const ChooseValueParams p) {
  const int64_t r = blockIdx.x;
  const int32_t place = next_value(p, r);
  __syncwarp();  // all lanes have read what was sampled
  if (place < 0) return;
  const T* const logits = static_cast<const T*>(p.logits) + r * p.logits_stride;
  const bool is_size = place == kValueSize;
  const int32_t a = likeliest_bin(logits + (is_size ? p.bins : 0), p.bins);
  const int32_t b = is_size ? likeliest_bin(logits + 2 * p.bins, p.bins) : 0;
  if (threadIdx.x == 0) p.sampled[r] = value_id(p, place, a, b);
}

}  // namespace

int spatial_features(const SpatialFeaturesParams& p, void* stream) {
  if (p.tokens == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(spatial_features_kernel<T>, p.tokens, kFeatureThreads, stream, p);
  });
}

int choose_value(const ChooseValueParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(choose_value_kernel<T>, p.num_segments, kWarpSize, stream, p);
  });
}

}  // namespace photon::cuda
