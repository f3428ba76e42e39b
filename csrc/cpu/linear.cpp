// Every linear: what the separate ops compute, bit for bit, with the tensors between them in
// scratch.
#include "common/linear.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrainElements = 32 * 1024;  // multiplications, about: a few microseconds of work
constexpr int64_t kWholeTiles = 24;            // weight rows that are whole tiles, of 3 or of 4

// The tokens to compute: all, or the first *counts of them.
int64_t leading_tokens(const LinearParams& p) {
  return p.counts == nullptr ? p.tokens : std::clamp<int64_t>(*p.counts, 0, p.tokens);
}

// Weight rows per grain, so that a chunk is worth handing to another thread; whole tiles.
int64_t rows_grain(int64_t tokens, int64_t row_size) {
  return kWholeTiles * (1 + kGrainElements / (kWholeTiles * (tokens * row_size + 1)));
}

// Rows of the calling thread's scratch, or of a tensor.
struct Rows {
  void* data;
  int64_t stride;  // elements
};

struct FloatRows {
  const float* data;
  int64_t stride;
};

// x in fp8, as numbers.
FloatRows fp8_tokens(const LinearParams& p, int64_t tokens) {
  thread_local Scratch scratch;
  const int64_t k = p.weight.k;
  float* const data = scratch.floats(tokens * k);
  WeightScales scales{};
  scales.data = p.x_scales;
  scales.stride = scales.rows = 1;
  scales.columns = k;
  const Weight x = {p.x, tokens, k, p.x_stride, WeightFormat::kFp8, scales};
  parallel_for(tokens, 1 + kGrainElements / (k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) simd().read_row(x, i, data + i * k, DType::kF32);
  });
  return {data, k};
}

// x, or x normalized: dense, valid until the next call.
FloatRows multiplied_tokens(const LinearParams& p, int64_t tokens) {
  if (p.x_scales != nullptr) return fp8_tokens(p, tokens);
  const int64_t k = p.weight.k, size = size_of(p.dtype);
  const void* x = p.x;
  int64_t stride = p.x_stride;
  if (p.prologue == Prologue::kRmsNorm) {
    thread_local Scratch normed;
    void* const out = normed.floats(tokens * k);  // of dtype; as floats there is room enough
    rms_norm({out, nullptr, x, p.norm_weight, tokens, k, k, 0, stride, p.eps, p.dtype});
    x = out;
    stride = k;
  }
  if (p.dtype == DType::kF32) return {static_cast<const float*>(x), stride};
  thread_local Scratch scratch;
  float* const data = scratch.floats(tokens * k);
  const SimdKernels& kernels = simd();
  parallel_for(tokens, 1 + kGrainElements / (k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels.to_float(data + i * k, static_cast<const char*>(x) + i * stride * size, k, p.dtype);
  });
  return {data, k};
}

// out [tokens, n] = y. `behind`(begin, end): what follows once these columns of all tokens are
// there.
template <typename Behind>
void multiply(const LinearParams& p, int64_t tokens, const Rows& out, const Behind& behind) {
  const Weight& w = p.weight;
  const SimdKernels& kernels = simd();
  const FloatRows x = multiplied_tokens(p, tokens);
  parallel_for(w.n, rows_grain(tokens, w.k), [&](int64_t begin, int64_t end) {
    kernels.linear(
        {out.data, x.data, w, p.bias, tokens, begin, end - begin, out.stride, x.stride, p.dtype});
    behind(begin, end);
  });
}

void multiply(const LinearParams& p, int64_t tokens, const Rows& out) {
  multiply(p, tokens, out, [](int64_t, int64_t) {});
}

// Room for y, dense, of dtype: valid until the next call.
Rows product_scratch(const LinearParams& p, int64_t tokens) {
  thread_local Scratch scratch;
  return {scratch.floats(tokens * p.weight.n), p.weight.n};
}

void add(const LinearParams& p, int64_t tokens) {
  const int64_t size = size_of(p.dtype);
  const SimdKernels& kernels = simd();
  const Rows y = product_scratch(p, tokens);
  multiply(p, tokens, y, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < tokens; ++i) {
      kernels.add(static_cast<char*>(p.residual) + (i * p.residual_stride + begin) * size,
                  static_cast<const char*>(y.data) + (i * y.stride + begin) * size, end - begin,
                  p.dtype);
    }
  });
}

// out = the residual, normalized, or that in fp8.
void normalize(const LinearParams& p, int64_t tokens) {
  const bool is_fp8 = p.out_scales != nullptr;
  const Rows normed = is_fp8 ? product_scratch(p, tokens) : Rows{p.out, p.out_stride};
  rms_norm({normed.data, nullptr, p.residual, p.norm_weight, tokens, p.weight.n, normed.stride, 0,
            p.residual_stride, p.eps, p.dtype});
  if (is_fp8)
    quantize_fp8({static_cast<uint8_t*>(p.out), p.out_scales, normed.data, nullptr, tokens,
                  p.weight.n, p.out_stride, normed.stride, p.dtype});
}

}  // namespace

void linear(const LinearParams& p) {
  const int64_t tokens = leading_tokens(p);
  if (tokens == 0) return;
  switch (p.epilogue) {
    case Epilogue::kStore:
      return multiply(p, tokens, {p.out, p.out_stride});
    case Epilogue::kSwiglu: {
      // In one run, because gate and up rows by turns are read more slowly.
      const Rows gate_up = product_scratch(p, tokens);
      multiply(p, tokens, gate_up);
      return silu_mul(
          {p.out, gate_up.data, tokens, p.outputs(), p.out_stride, gate_up.stride, p.dtype});
    }
    case Epilogue::kAdd:
      return add(p, tokens);
    case Epilogue::kAddNorm:
      add(p, tokens);
      return normalize(p, tokens);
  }
}

}  // namespace photon::cpu
