// dequantize: the numbers of a weight of few bits, for a product by someone else's kernel.
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/stored_row.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T, bool kPacks>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeParams p) {
  wait_for_earlier();
  const int64_t row = blockIdx.x;
  T* const out = static_cast<T*>(p.out) + row * p.out_stride;
  const StoredRow numbers = stored_row(p.weight, row);
  if constexpr (kPacks) {
    write_packs(out, numbers, p.weight.k, kThreads);
  } else {
    write_numbers(out, numbers, p.weight.k, kThreads);
  }
}

// What write_packs() asks for.
bool has_packs(const DequantizeParams& p) {
  const Weight& w = p.weight;
  const int64_t bytes = w.format == WeightFormat::kFp8 ? kPack : 2;
  const auto codes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(w.data)) | w.stride;
  return w.k % kPack == 0 && codes % bytes == 0 && is_vector_aligned(p.out) &&
         are_whole_vectors(p.dtype, p.out_stride);
}

}  // namespace

int dequantize(const DequantizeParams& p, void* stream) {
  if (p.weight.n == 0 || p.weight.k == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LaunchShape shape = waiting_shape(p.weight.n, kThreads);
    return has_packs(p) ? launch(dequantize_kernel<T, true>, shape, stream, p)
                        : launch(dequantize_kernel<T, false>, shape, stream, p);
  });
}

}  // namespace photon::cuda
