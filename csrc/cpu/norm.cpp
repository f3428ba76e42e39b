// rms_norm and add_rms_norm, in the order of Hugging Face's Llama: weight * round(x *
// rsqrt(mean(x^2) + eps)).
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kNormGrainElements = 16 * 1024;

}  // namespace

void rms_norm(const RmsNormParams& p) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype);
  parallel_for(p.tokens, 1 + kNormGrainElements / (p.hidden + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* residual = static_cast<char*>(p.residual);
      kernels.rms_norm({static_cast<char*>(p.out) + i * p.out_stride * size,
                        residual != nullptr ? residual + i * p.residual_stride * size : nullptr,
                        static_cast<const char*>(p.x) + i * p.x_stride * size, p.weight, p.hidden,
                        p.eps, p.dtype});
    }
  });
}

}  // namespace photon::cpu
