// A pack that is loaded where it stands in the code: load_pack() may be moved to where its elements
// are first used, behind a branch that waits for memory itself.
#pragma once
#include "cuda/element.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {

// As load_pack(), and with kVector past L1.
template <bool kVector, typename T>
__device__ inline Pack<T> load_fresh_pack(const T* p, int64_t count) {
  if constexpr (kVector) {
    Pack<T> pack;
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i)
      reinterpret_cast<uint4*>(&pack)[i] =
          load_fresh_if(count > 0, reinterpret_cast<const uint4*>(p) + i);
    return pack;
  } else {
    return load_pack<false>(p, count);
  }
}

}  // namespace photon::cuda
