#include "cuda/attention/split_attention.h"

#include "cuda/attention/split_kernel.cuh"

namespace photon::cuda {

int split_attention(const FusedAttentionDecodeParams& p, void* stream) {
  switch (p.head_dim) {
    case 64:
      return launch_halves<SplitShape<Bf16Kv, 64>>(p, stream);
    case 96:
      return launch_halves<SplitShape<Bf16Kv, 96>>(p, stream);
    case 128:
      return launch_halves<SplitShape<Bf16Kv, 128>>(p, stream);
    default:
      return launch_halves<SplitShape<Bf16Kv, 256>>(p, stream);
  }
}

}  // namespace photon::cuda

PHOTON_TAKE_STAMPS(attention)
