// quantize_fp8: tokens as e4m3 bytes, each with its own scale.
#include <algorithm>

#include "common/e4m3.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 4 * 1024;

}  // namespace

void quantize_fp8(const QuantizeFp8Params& p) {
  const int64_t size = size_of(p.dtype);
  const int64_t tokens =
      p.counts == nullptr ? p.tokens : std::clamp<int64_t>(*p.counts, 0, p.tokens);
  parallel_for(tokens, 1 + kGrainElements / (p.k + 1), [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    float* const numbers = scratch.floats(p.k);
    for (int64_t i = begin; i < end; ++i) {
      simd().to_float(numbers, static_cast<const char*>(p.x) + i * p.x_stride * size, p.k, p.dtype);
      p.scales[i] = quantize_e4m3(p.out + i * p.out_stride, numbers, p.k);
    }
  });
}

}  // namespace photon::cpu
