// What the linears and the gated MLPs share: the leading lines that count, x as float32, and gate, up and their product.
#pragma once
#include <cstdint>

#include "common/dtype.h"

namespace photon::cpu {

// The lines to compute: all, or the first *extent of them.
int64_t leading_lines(int64_t lines, const int32_t* extent);

struct FloatLines {
  const float* data;
  int64_t stride;
};

// x itself if it is float32, else a converted copy in the calling thread's scratch, valid until the next call.
FloatLines float_lines(const void* x, int64_t lines, int64_t size, int64_t stride, DType dtype);

// out = silu(x . gate) * (x . up), every factor rounded as linear and silu_mul round it.
struct Swiglu {
  void* out;           // [lines, intermediate]
  const void* x;       // [lines, hidden]
  const void* weight;  // [2 * intermediate, hidden]: gate rows, then up rows
  const void* bias;    // [2 * intermediate] or null
  int64_t lines, hidden, intermediate, out_stride, x_stride;
  DType dtype;
};
void swiglu(const Swiglu& p);

// Weight rows per grain, so that a chunk is worth handing to another thread; a multiple of 8.
int64_t rows_grain(int64_t lines, int64_t row_size);

}  // namespace photon::cpu
