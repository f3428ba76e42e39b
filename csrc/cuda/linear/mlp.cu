// silu_mul.
#include "cuda/divisor.cuh"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/pair.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {
namespace {

constexpr int kMostThreads = 256;

// As load_pack(), of elements that nothing reads again; the first is there.
template <bool kVector, typename T>
__device__ Pack<T> load_pack_once(const T* p, int64_t count) {
  if constexpr (kVector) {
    Pack<T> pack;
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i)
      reinterpret_cast<uint4*>(&pack)[i] = load_once(reinterpret_cast<const uint4*>(p) + i);
    return pack;
  } else {
    return load_pack<false>(p, count);
  }
}

// Each token has `parts` CTAs, which share its packs out evenly.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kMostThreads)
    silu_mul_kernel(const SiluMulParams p, const Divisor parts) {
  wait_for_earlier();
  const uint32_t token = parts.divides(blockIdx.x), part = blockIdx.x - token * parts.of;
  const int64_t d = (static_cast<int64_t>(part) * blockDim.x + threadIdx.x) * kPack;
  if (d >= p.width) return;
  const T* const gates = static_cast<const T*>(p.gate_up) + token * p.gate_up_stride + d;
  Pack<T> gate = load_pack_once<kVector>(gates, p.width - d);
  const Pack<T> up = load_pack_once<kVector>(gates + p.width, p.width - d);
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float2 v = to_floats(get_pair(gate, i));
    set_pair(gate, i, times(from_floats<T>(silu(v.x), silu(v.y)), get_pair(up, i)));
  }
  store_pack<kVector>(static_cast<T*>(p.out) + token * p.out_stride + d, gate, p.width - d);
}

}  // namespace

int silu_mul(const SiluMulParams& p, void* stream) {
  if (p.tokens == 0 || p.width == 0) return 0;
  const bool vectors = p.width % kPack == 0 && is_vector_aligned(p.out) &&
                       is_vector_aligned(p.gate_up) &&
                       are_whole_vectors(p.dtype, p.out_stride, p.gate_up_stride);
  const int64_t packs = ceil_div(p.width, kPack), parts = ceil_div(packs, kMostThreads);
  const int64_t warps = ceil_div(ceil_div(packs, parts), kWarpSize);
  const LaunchShape shape = waiting_shape(p.tokens * parts, static_cast<int>(warps) * kWarpSize);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(vectors ? silu_mul_kernel<T, true> : silu_mul_kernel<T, false>, shape, stream, p,
                  Divisor(parts));
  });
}

}  // namespace photon::cuda
