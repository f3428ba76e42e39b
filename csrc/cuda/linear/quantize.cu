// quantize_fp8: tokens as e4m3 bytes, for a product by a weight in fp8. One CTA for each token.
#include <algorithm>
#include <type_traits>

#include "cuda/fresh_pack.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/quantize.cuh"

namespace photon::cuda {
namespace {

// So few that there is room beside a CTA of a linear, or it would wait for that to end.
constexpr int kMostThreads = 512;
// Packs of a thread that stay in registers: of what Hopper linears read, four.
template <typename T, bool kVector>
constexpr int kPacks = kVector && std::is_same_v<T, __nv_bfloat16> ? 4 : 1;

template <typename T, bool kVector>
__global__ void __launch_bounds__(kMostThreads) quantize_fp8_kernel(const QuantizeFp8Params p) {
  __shared__ uint32_t warps[kWarpSize];
  let_next_start();
  wait_for_earlier();
  const int64_t token = blockIdx.x;
  if (p.counts != nullptr && token >= load_fresh(p.counts)) return;
  const T* const x = static_cast<const T*>(p.x) + token * p.x_stride;
  uint8_t* const out = p.out + token * p.out_stride;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kPack,
                step = static_cast<int64_t>(blockDim.x) * kPack;
  constexpr int kOwn = kPacks<T, kVector>;
  Pack<T> packs[kOwn];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    packs[i] = load_fresh_pack<kVector>(x + first + i * step, p.k - first - i * step);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) largest = max(largest, largest_of(packs[i]));
  for (int64_t at = first + kOwn * step; at < p.k; at += step)
    largest = max(largest, largest_of(load_fresh_pack<kVector>(x + at, p.k - at)));
  const float scale = e4m3_scale(block_largest(largest, warps));
  if (threadIdx.x == 0) p.scales[token] = scale;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int64_t at = first + i * step;
    if (at < p.k) store_codes<kVector>(out + at, packs[i], scale, p.k - at);
  }
  for (int64_t at = first + kOwn * step; at < p.k; at += step)
    store_codes<kVector>(out + at, load_fresh_pack<kVector>(x + at, p.k - at), scale, p.k - at);
}

bool has_vectors(const QuantizeFp8Params& p) {
  return p.k % kPack == 0 && is_vector_aligned(p.x) && are_whole_vectors(p.dtype, p.x_stride) &&
         reinterpret_cast<uintptr_t>(p.out) % kPack == 0 && p.out_stride % kPack == 0;
}

}  // namespace

int quantize_fp8(const QuantizeFp8Params& p, void* stream) {
  if (p.tokens == 0) return 0;
  const int64_t warps = ceil_div(p.k, int64_t{kWarpSize} * kPack * kPacks<__nv_bfloat16, true>);
  const int64_t most = kMostThreads / kWarpSize;
  const LaunchShape shape =
      waiting_shape(p.tokens, static_cast<int>(std::clamp<int64_t>(warps, 1, most)) * kWarpSize);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return has_vectors(p) ? launch(quantize_fp8_kernel<T, true>, shape, stream, p)
                          : launch(quantize_fp8_kernel<T, false>, shape, stream, p);
  });
}

}  // namespace photon::cuda
