#include <algorithm>

#include "common/decode_meta.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 32 * 1024;  // multiplications, about: a few microseconds of work

}  // namespace

int64_t leading_lines(int64_t lines, const int32_t* extent) { return extent == nullptr ? lines : std::clamp<int64_t>(*extent, 0, lines); }

FloatLines float_lines(const void* x, int64_t lines, int64_t size, int64_t stride, DType dtype) {
  if (dtype == DType::kF32) return {static_cast<const float*>(x), stride};
  thread_local Scratch scratch;
  float* const data = scratch.floats(lines * size);
  const SimdKernels& kernels = simd();
  parallel_for(lines, 1 + kGrainElements / (size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.to_float(data + i * size, static_cast<const char*>(x) + i * stride * size_of(dtype), size, dtype);
    }
  });
  return {data, size};
}

int64_t rows_grain(int64_t lines, int64_t row_size) { return 8 * (1 + kGrainElements / (8 * (lines * row_size + 1))); }

void linear(const LinearParams& p) {
  const int64_t lines = leading_lines(p.lines, p.extent), size = size_of(p.dtype);
  if (lines == 0) return;
  const SimdKernels& kernels = simd();
  const FloatLines x = float_lines(p.x, lines, p.k, p.x_stride, p.dtype);
  parallel_for(p.n, rows_grain(lines, p.k), [&](int64_t begin, int64_t end) {
    const char* bias = static_cast<const char*>(p.bias);
    kernels.linear({static_cast<char*>(p.out) + begin * size, x.data, static_cast<const char*>(p.weight) + begin * p.weight_stride * size,
                    bias != nullptr ? bias + begin * size : nullptr, lines, end - begin, p.k, p.out_stride, x.stride, p.weight_stride,
                    p.dtype});
  });
}

}  // namespace photon::cpu
