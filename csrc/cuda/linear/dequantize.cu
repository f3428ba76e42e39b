// dequantize: the numbers of a weight of few bits, for a product by someone else's kernel.
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/stored_row.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeParams p) {
  wait_for_earlier();
  const int64_t row = blockIdx.x;
  write_numbers<T>(static_cast<T*>(p.out) + row * p.out_stride, stored_row(p.weight, row),
                   p.weight.k, kThreads);
}

}  // namespace

int dequantize(const DequantizeParams& p, void* stream) {
  if (p.weight.n == 0 || p.weight.k == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(dequantize_kernel<T>, waiting_shape(p.weight.n, kThreads), stream, p);
  });
}

}  // namespace photon::cuda
