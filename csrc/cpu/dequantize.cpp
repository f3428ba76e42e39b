// dequantize: the numbers of a weight of few bits.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

}  // namespace

void dequantize(const DequantizeParams& p) {
  const Weight& w = p.weight;
  const SimdKernels& kernels = simd();
  const int64_t stride = p.out_stride * size_of(p.dtype);
  parallel_for(w.n, 1 + kGrainElements / (w.k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels.read_row(w, row, static_cast<char*>(p.out) + row * stride, p.dtype);
  });
}

}  // namespace photon::cpu
