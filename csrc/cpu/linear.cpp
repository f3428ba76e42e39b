#include <algorithm>

#include "common/decode_meta.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tokens.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 32 * 1024;  // multiplications, about: a few microseconds of work

}  // namespace

int64_t leading_tokens(int64_t tokens, const int32_t* counts) {
  return counts == nullptr ? tokens : std::clamp<int64_t>(*counts, 0, tokens);
}

FloatTokens float_tokens(const void* x, int64_t tokens, int64_t size, int64_t stride, DType dtype) {
  if (dtype == DType::kF32) return {static_cast<const float*>(x), stride};
  thread_local Scratch scratch;
  float* const data = scratch.floats(tokens * size);
  const SimdKernels& kernels = simd();
  parallel_for(tokens, 1 + kGrainElements / (size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.to_float(data + i * size, static_cast<const char*>(x) + i * stride * size_of(dtype),
                       size, dtype);
    }
  });
  return {data, size};
}

int64_t rows_grain(int64_t tokens, int64_t row_size) {
  return kWholeTiles * (1 + kGrainElements / (kWholeTiles * (tokens * row_size + 1)));
}

void linear(const LinearParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts), size = size_of(p.dtype);
  if (tokens == 0) return;
  const SimdKernels& kernels = simd();
  const FloatTokens x = float_tokens(p.x, tokens, p.k, p.x_stride, p.dtype);
  parallel_for(p.n, rows_grain(tokens, p.k), [&](int64_t begin, int64_t end) {
    const char* bias = static_cast<const char*>(p.bias);
    kernels.linear({static_cast<char*>(p.out) + begin * size, x.data,
                    static_cast<const char*>(p.weight) + begin * p.weight_stride * size,
                    bias != nullptr ? bias + begin * size : nullptr, tokens, end - begin, p.k,
                    p.out_stride, x.stride, p.weight_stride, p.dtype});
  });
}

}  // namespace photon::cpu
