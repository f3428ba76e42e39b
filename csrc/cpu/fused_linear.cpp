// norm_linear, linear_residual, norm_swiglu, swiglu and linear_norm: what the separate ops compute,
// bit for bit, with the tensors between them in scratch.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tokens.h"

namespace photon::cpu {
namespace {

// rms_norm of the tokens, dense, in the calling thread's scratch: valid until the next call.
const void* normed_tokens(const void* x, const void* weight, int64_t tokens, int64_t size,
                          int64_t stride, float eps, DType dtype) {
  thread_local Scratch scratch;
  void* const out = scratch.floats(tokens * size);  // of dtype; as floats there is room enough
  rms_norm({out, nullptr, x, weight, tokens, size, size, 0, stride, eps, dtype});
  return out;
}

}  // namespace

void norm_linear(const NormLinearParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts);
  if (tokens == 0) return;
  const void* const normed =
      normed_tokens(p.x, p.norm_weight, tokens, p.k, p.x_stride, p.eps, p.dtype);
  linear({p.out, normed, p.weight, p.bias, nullptr, tokens, p.n, p.k, p.out_stride, p.k,
          p.weight_stride, p.dtype});
}

void linear_residual(const LinearResidualParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts), size = size_of(p.dtype);
  if (tokens == 0) return;
  const SimdKernels& kernels = simd();
  const FloatTokens x = float_tokens(p.x, tokens, p.k, p.x_stride, p.dtype);
  thread_local Scratch scratch;
  char* const product =
      reinterpret_cast<char*>(scratch.floats(tokens * p.n));  // [tokens, n] of dtype
  parallel_for(p.n, rows_grain(tokens, p.k), [&](int64_t begin, int64_t end) {
    const char* bias = static_cast<const char*>(p.bias);
    kernels.linear({product + begin * size, x.data,
                    static_cast<const char*>(p.weight) + begin * p.weight_stride * size,
                    bias != nullptr ? bias + begin * size : nullptr, tokens, end - begin, p.k, p.n,
                    x.stride, p.weight_stride, p.dtype});
    for (int64_t i = 0; i < tokens; ++i) {
      kernels.add(static_cast<char*>(p.residual) + (i * p.residual_stride + begin) * size,
                  product + (i * p.n + begin) * size, end - begin, p.dtype);
    }
  });
}

void norm_swiglu(const NormSwigluParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts);
  if (tokens == 0) return;
  const void* const normed =
      normed_tokens(p.x, p.norm_weight, tokens, p.hidden, p.x_stride, p.eps, p.dtype);
  swiglu({p.out, normed, p.weight, p.bias, nullptr, tokens, p.intermediate, p.hidden, p.out_stride,
          p.hidden, false, false, p.dtype});
}

void swiglu(const SwigluParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts), rows = 2 * p.intermediate;
  if (tokens == 0) return;
  thread_local Scratch scratch;
  void* const gate_up = scratch.floats(
      tokens *
      rows);  // of dtype; in one run, because gate and up rows by turns are read more slowly
  linear({gate_up, p.x, p.weight, p.bias, nullptr, tokens, rows, p.hidden, rows, p.x_stride,
          p.hidden, p.dtype});
  silu_mul({p.out, gate_up, tokens, p.intermediate, p.out_stride, rows, p.dtype});
}

void linear_norm(const LinearNormParams& p) {
  const int64_t tokens = leading_tokens(p.tokens, p.counts);
  if (tokens == 0) return;
  linear_residual({p.residual, p.x, p.weight, p.bias, nullptr, tokens, p.n, p.k, p.residual_stride,
                   p.x_stride, p.weight_stride, false, false, p.dtype});
  rms_norm({p.out, nullptr, p.residual, p.norm_weight, tokens, p.n, p.out_stride, 0,
            p.residual_stride, p.eps, p.dtype});
}

}  // namespace photon::cpu
