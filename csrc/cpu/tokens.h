// What the linears and fused_mlp share: the leading tokens that count, and x as float32.
#pragma once
#include <cstdint>

#include "common/dtype.h"

namespace photon::cpu {

// The tokens to compute: all, or the first *counts of them.
int64_t leading_tokens(int64_t tokens, const int32_t* counts);

struct FloatTokens {
  const float* data;
  int64_t stride;
};

// x itself if it is float32, else a converted copy in the calling thread's scratch, valid until the
// next call.
FloatTokens float_tokens(const void* x, int64_t tokens, int64_t size, int64_t stride, DType dtype);

// Weight rows that are whole tiles, be these of 3 or of 4.
constexpr int64_t kWholeTiles = 24;

// Weight rows per grain, so that a chunk is worth handing to another thread; whole tiles.
int64_t rows_grain(int64_t tokens, int64_t row_size);

}  // namespace photon::cpu
