// Division by a number that the host knows: a multiplication and a shift.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace photon::cuda {

// `of` is from 1 to 2^31 - 1; what it divides is less than 2^31. With 2^s the first power of two
// from `of` on and m = ceil(2^(31 + s) / of), n * m exceeds n / of * 2^(31 + s) by less than 2^31
// <= 2^(31 + s) / of, and n / of is at least 1 / of away from the next quotient.
struct Divisor {
  uint32_t of = 1, multiplier = 1u << 31, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t number) : of(static_cast<uint32_t>(number)) {
    while ((int64_t{1} << shift) < number) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + of - 1) / of);
  }

  __device__ uint32_t divides(uint32_t n) const { return __umulhi(2 * n, multiplier) >> shift; }
};

}  // namespace photon::cuda
