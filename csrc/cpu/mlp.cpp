// silu_mul.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;

}  // namespace

void silu_mul(const SiluMulParams& p) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype);
  parallel_for(p.tokens, 1 + kGrainElements / (p.width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* gate = static_cast<const char*>(p.gate_up) + i * p.gate_up_stride * size;
      kernels.silu_mul(static_cast<char*>(p.out) + i * p.out_stride * size, gate,
                       gate + p.width * size, p.width, p.dtype);
    }
  });
}

}  // namespace photon::cpu
