// silu_mul, and the gated MLP as two passes over weights: gate, up and their product chunk by chunk, then down.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kSiluGrainElements = 8 * 1024;
constexpr int64_t kMlpRows = 32;   // gate rows, and as many up rows, whose results are in hand at once
constexpr int64_t kMlpLines = 24;  // lines per pass over those rows

// out[:, begin .. end], at most kMlpRows of them.
void swiglu_rows(const Swiglu& p, const FloatLines& x, int64_t begin, int64_t end) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype), rows = end - begin;
  const char* weight = static_cast<const char*>(p.weight);
  const char* bias = static_cast<const char*>(p.bias);
  float gate[kMlpLines * kMlpRows], up[kMlpLines * kMlpRows];  // of dtype; as floats there is room enough
  for (int64_t first = 0; first < p.lines; first += kMlpLines) {
    const int64_t count = std::min(kMlpLines, p.lines - first);
    const auto multiply = [&](void* out, int64_t row) {
      kernels.linear({out, x.data + first * x.stride, weight + row * p.hidden * size, bias != nullptr ? bias + row * size : nullptr, count,
                      rows, p.hidden, kMlpRows, x.stride, p.hidden, p.dtype});
    };
    multiply(gate, begin);
    multiply(up, p.intermediate + begin);
    for (int64_t i = 0; i < count; ++i) {
      kernels.silu_mul(static_cast<char*>(p.out) + ((first + i) * p.out_stride + begin) * size,
                       reinterpret_cast<const char*>(gate) + i * kMlpRows * size, reinterpret_cast<const char*>(up) + i * kMlpRows * size,
                       rows, p.dtype);
    }
  }
}

}  // namespace

void silu_mul(const SiluMulParams& p) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype);
  parallel_for(p.lines, 1 + kSiluGrainElements / (p.width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* gate = static_cast<const char*>(p.gate_up) + i * p.gate_up_stride * size;
      kernels.silu_mul(static_cast<char*>(p.out) + i * p.out_stride * size, gate, gate + p.width * size, p.width, p.dtype);
    }
  });
}

void swiglu(const Swiglu& p) {
  const FloatLines x = float_lines(p.x, p.lines, p.hidden, p.x_stride, p.dtype);
  parallel_for(p.intermediate, kMlpRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kMlpRows) swiglu_rows(p, x, row, std::min(row + kMlpRows, end));
  });
}

void fused_mlp(const FusedMlpParams& p) {
  const int64_t lines = leading_lines(p.lines, p.extent);
  if (lines == 0) return;
  swiglu({p.act, p.x, p.gate_up_weight, nullptr, lines, p.hidden, p.intermediate, p.act_stride, p.x_stride, p.dtype});
  linear({p.out, p.act, p.down_weight, nullptr, nullptr, lines, p.hidden, p.intermediate, p.out_stride, p.act_stride, p.intermediate,
          p.dtype});
}

}  // namespace photon::cpu
