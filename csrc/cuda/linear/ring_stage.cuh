// Where the copies of a linear's operands have got to in their ring of shared memory.
#pragma once
#include <cstdint>

namespace photon::cuda {

// A place in a ring, and how often it has gone round.
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace photon::cuda
