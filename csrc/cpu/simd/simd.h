// The hot loops, compiled once per ISA (simd/*.cpp) and chosen once at run time. Plain pointers in,
// one token or block at a time; threads, strides of whole tensors and decode_meta are the callers'
// business.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/weight.h"

namespace photon::cpu {

// out[t, r] = x[t, :] . weight[r, :] + bias[r] for the `rows` weight rows from `first` on, rounded
// once to dtype. Every output has one accumulator of 16 lanes along k, whatever the tile it is
// computed in; the numbers of a weight that is not dense are rounded to float32 first.
struct LinearBlock {
  void* out;
  const float* x;
  Weight weight;
  const void* bias;  // or null
  int64_t tokens, first, rows, out_stride, x_stride;
  DType dtype;
};

// out = weight * round(v * rsqrt(mean(v^2) + eps)), v = x, or v = residual = round(residual + x)
// where residual is set.
struct NormToken {
  void* out;
  void* residual;  // or null
  const void* x;
  const void* weight;
  int64_t size;
  float eps;
  DType dtype;
};

// One head: RMS norm with `norm` if set, then the rotation by cos and sin [head_dim] of its
// position.
struct RotateHead {
  void* out;  // may be `in`
  const void* in;
  const void* norm;  // [head_dim] or null
  const float* cos;
  const float* sin;
  int64_t head_dim;
  float eps;
  DType dtype;
};

// The context of one row for one KV head.
struct KvContext {
  const void* k;  // element 0 of this head in page 0
  const void* v;
  const int32_t* pages;  // [row_pages]; tokens in pages outside 0 .. num_pages - 1 are left out
  int64_t row_pages, num_pages, page_size, k_page_stride, k_token_stride, v_page_stride,
      v_token_stride;
  const float* k_scale;  // of this head's keys in page 0, [page_size]; null: they are of the dtype
  const float* v_scale;
  int64_t scale_page_stride;
};

// The query heads of one token that share a KV head, over positions 0 .. length - 1.
struct AttendGroup {
  void* out;
  const void* q;
  KvContext context;
  int64_t heads, head_dim, length, q_head_stride, out_head_stride;
  float scale;
  DType dtype;
};

struct Candidate {
  float value;
  int32_t id;  // -1: no element is above -inf
};

struct SimdKernels {
  const char* name;
  void (*to_float)(float* to, const void* from, int64_t n, DType dtype);
  void (*linear)(const LinearBlock& block);
  // out [k] = a row of a weight that is not dense.
  void (*read_row)(const Weight& weight, int64_t row, void* out, DType dtype);
  void (*rms_norm)(const NormToken& token);
  void (*add)(void* to, const void* x, int64_t n, DType dtype);  // to = round(to + x)
  void (*silu_mul)(void* out, const void* gate, const void* up, int64_t n, DType dtype);
  void (*rotate)(const RotateHead& head);
  void (*attend)(const AttendGroup& group);
  // The largest of values[0 .. n), the first of equals; NaN and -inf are no candidates.
  Candidate (*argmax)(const void* values, int64_t n, DType dtype);
};

// The best set this machine can run; PHOTON_CPU_ISA=baseline|avx2|avx512 asks for a lower one.
// Chosen at the first call.
const SimdKernels& simd();

// What is wrong with the value of PHOTON_CPU_ISA, or null. simd() is the baseline then; the Python
// package refuses to load.
const char* simd_error();

}  // namespace photon::cpu
