// silu_mul, and the gated MLP as two passes over weights: gate, up and their product chunk by chunk, then down.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kSiluGrainElements = 8 * 1024;
constexpr int64_t kMlpRows = 32;            // gate rows, and as many up rows: a grain
constexpr int64_t kMlpProducts = 3 * 1024;  // of gate rows with lines, and as many of up rows, in hand at once

// out[:, begin .. end], at most kMlpProducts of them.
void swiglu_rows(const Swiglu& p, const FloatLines& x, int64_t begin, int64_t end) {
  const SimdKernels& kernels = simd();
  const int64_t size = size_of(p.dtype), rows = end - begin, block = kMlpProducts / rows;
  const char* weight = static_cast<const char*>(p.weight);
  const char* bias = static_cast<const char*>(p.bias);
  float gate[kMlpProducts], up[kMlpProducts];  // of dtype; as floats there is room enough
  for (int64_t first = 0; first < p.lines; first += block) {
    const int64_t count = std::min(block, p.lines - first);
    const auto multiply = [&](void* out, int64_t row) {
      kernels.linear({out, x.data + first * x.stride, weight + row * p.hidden * size, bias != nullptr ? bias + row * size : nullptr, count,
                      rows, p.hidden, rows, x.stride, p.hidden, p.dtype});
    };
    multiply(gate, begin);
    multiply(up, p.intermediate + begin);
    for (int64_t i = 0; i < count; ++i) {
      kernels.silu_mul(static_cast<char*>(p.out) + ((first + i) * p.out_stride + begin) * size,
                       reinterpret_cast<const char*>(gate) + i * rows * size, reinterpret_cast<const char*>(up) + i * rows * size, rows,
                       p.dtype);
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
  const int64_t rows = std::max(kMlpRows, kMlpProducts / p.lines / kMlpRows * kMlpRows);  // few lines: long runs of weights, read fastest
  parallel_for(p.intermediate, kMlpRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += rows) swiglu_rows(p, x, row, std::min(row + rows, end));
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
