#include "cuda/attention/split_attention.h"
#include "cuda/attention/split_kernel.cuh"

namespace photon::cuda {

int fp8_split_attention(const FusedAttentionDecodeParams& p, void* stream) {
  switch (p.head_dim) {
    case 64:
      return launch_halves<SplitShape<Fp8Kv, 64>>(p, stream);
    case 96:
      return launch_halves<SplitShape<Fp8Kv, 96>>(p, stream);
    default:
      return launch_halves<SplitShape<Fp8Kv, 128>>(p, stream);
  }
}

}  // namespace photon::cuda
