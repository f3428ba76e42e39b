// Rounding of a few values, by the kernels of the machine.
#pragma once
#include "common/linear.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {

// out[i] = x[i], rounded to dtype: a linear of one column whose weight is 1.
inline void round_to(void* out, const float* x, int64_t n, DType dtype) {
  // the bits of 1, in the first bytes
  const uint32_t one = dtype == DType::kF32   ? 0x3f800000u
                       : dtype == DType::kF16 ? 0x3c00u
                                              : 0x3f80u;
  simd().linear({out, x, dense_weight(&one, 1, 1, 1), nullptr, n, 0, 1, 1, 1, dtype});
}

}  // namespace photon::cpu
