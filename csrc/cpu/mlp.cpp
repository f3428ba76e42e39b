// silu_mul, and the gated MLP as two passes over weights: gate, up and their product chunk by
// chunk, then down.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"
#include "cpu/tokens.h"

namespace photon::cpu {
namespace {

constexpr int64_t kSiluGrainElements = 8 * 1024;
// Gate rows, and as many up rows, whose results are in hand at once.
constexpr int64_t kMlpRows = 2 * kWholeTiles;
constexpr int64_t kMlpTokens = 24;  // tokens per pass over those rows

// act[:, begin .. end] = silu(x . gate) * (x . up), every factor rounded as linear and silu_mul
// round it.
void gate_and_up(const FusedMlpParams& p, const FloatTokens& x, int64_t tokens, int64_t begin,
                 int64_t end) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype), rows = end - begin;
  const char* gate_weight = static_cast<const char*>(p.gate_up_weight) + begin * p.hidden * size;
  const char* up_weight = gate_weight + p.intermediate * p.hidden * size;
  float gate[kMlpTokens * kMlpRows],
      up[kMlpTokens * kMlpRows];  // of dtype; as floats there is room enough
  for (int64_t first = 0; first < tokens; first += kMlpTokens) {
    const int64_t count = std::min(kMlpTokens, tokens - first);
    const float* from = x.data + first * x.stride;
    kernels.linear({gate, from, gate_weight, nullptr, count, rows, p.hidden, kMlpRows, x.stride,
                    p.hidden, p.dtype});
    kernels.linear({up, from, up_weight, nullptr, count, rows, p.hidden, kMlpRows, x.stride,
                    p.hidden, p.dtype});
    for (int64_t i = 0; i < count; ++i) {
      kernels.silu_mul(static_cast<char*>(p.act) + ((first + i) * p.act_stride + begin) * size,
                       reinterpret_cast<const char*>(gate) + i * kMlpRows * size,
                       reinterpret_cast<const char*>(up) + i * kMlpRows * size, rows, p.dtype);
    }
  }
}

}  // namespace

void silu_mul(const SiluMulParams& p) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype);
  parallel_for(p.tokens, 1 + kSiluGrainElements / (p.width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* gate = static_cast<const char*>(p.gate_up) + i * p.gate_up_stride * size;
      kernels.silu_mul(static_cast<char*>(p.out) + i * p.out_stride * size, gate,
                       gate + p.width * size, p.width, p.dtype);
    }
  });
}

void fused_mlp(const FusedMlpParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts);
  if (tokens == 0) return;
  const FloatTokens x = float_tokens(p.x, tokens, p.hidden, p.x_stride, p.dtype);
  parallel_for(p.intermediate, kMlpRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kMlpRows)
      gate_and_up(p, x, tokens, row, std::min(row + kMlpRows, end));
  });
  linear({p.out, p.act, p.down_weight, nullptr, nullptr, tokens, p.hidden, p.intermediate,
          p.out_stride, p.act_stride, p.intermediate, p.dtype});
}

}  // namespace photon::cpu
