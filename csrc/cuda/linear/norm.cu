// rms_norm and add_rms_norm: one CTA per token, whose size depends on the width alone.
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/norm.cuh"
#include "cuda/linear/pair.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace {

// The pack that is normalized: x itself, or the new residual, which is stored here.
template <typename T, bool kVector>
__device__ Pack<T> load_input(const RmsNormParams& p, int64_t token, int64_t first) {
  const int64_t count = p.hidden - first;
  Pack<T> pack = load_pack<kVector>(static_cast<const T*>(p.x) + token * p.x_stride + first, count);
  if (p.residual == nullptr) return pack;
  T* residual = static_cast<T*>(p.residual) + token * p.residual_stride + first;
  const Pack<T> old = load_pack<kVector>(residual, count);
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float2 a = to_floats(get_pair(old, i)), b = to_floats(get_pair(pack, i));
    set_pair(pack, i, from_floats<T>(a.x + b.x, a.y + b.y));
  }
  store_pack<kVector>(residual, pack, count);
  return pack;
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kMaxNormThreads) rms_norm_kernel(const RmsNormParams p) {
  __shared__ float partial[kWarpSize];
  wait_for_earlier();
  const int64_t token = blockIdx.x;
  if (p.counts != nullptr && token >= load_fresh(p.counts)) return;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kPack,
                step = static_cast<int64_t>(blockDim.x) * kPack;
  const T* const weight = static_cast<const T*>(p.weight);
  T* const out = static_cast<T*>(p.out) + token * p.out_stride;

  // A thread's first pack, which is its only one unless the token is wider than kMaxNormThreads
  // packs, stays in registers, and its weights are under way while squares are summed.
  const Pack<T> own = load_input<T, kVector>(p, token, first),
                gain = load_pack<kVector>(weight + first, p.hidden - first);
  const auto load = [&](int64_t d) {
    return d == first ? own : load_input<T, kVector>(p, token, d);
  };
  const float squares = block_sum(sum_squares(load, p.hidden, threadIdx.x, blockDim.x), partial);
  const float scale = norm_scale(squares, p.hidden, p.eps);
  store_pack<kVector>(out + first, normalized(own, gain, scale), p.hidden - first);

  // The others again, out of the cache: a thread reads back only what it read or wrote itself.
  const T* input = p.residual != nullptr
                       ? static_cast<const T*>(p.residual) + token * p.residual_stride
                       : static_cast<const T*>(p.x) + token * p.x_stride;
  for (int64_t d = first + step; d < p.hidden; d += step) {
    const int64_t count = p.hidden - d;
    store_pack<kVector>(out + d,
                        normalized(load_pack<kVector>(input + d, count),
                                   load_pack<kVector>(weight + d, count), scale),
                        count);
  }
}

bool can_use_vectors(const RmsNormParams& p) {
  const bool residual = p.residual == nullptr || (is_vector_aligned(p.residual) &&
                                                  are_whole_vectors(p.dtype, p.residual_stride));
  return residual && p.hidden % kPack == 0 && is_vector_aligned(p.out) && is_vector_aligned(p.x) &&
         is_vector_aligned(p.weight) && are_whole_vectors(p.dtype, p.out_stride, p.x_stride);
}

}  // namespace

int rms_norm(const RmsNormParams& p, void* stream) {
  if (p.tokens == 0 || p.hidden == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(can_use_vectors(p) ? rms_norm_kernel<T, true> : rms_norm_kernel<T, false>,
                  waiting_shape(p.tokens, norm_threads(p.hidden)), stream, p);
  });
}

}  // namespace photon::cuda
