#include "cuda/attention/chunk_attention.h"
#include "cuda/attention/chunk_kernel.cuh"

namespace photon::cuda {
namespace {

template <int kHeadDim, int kFragments>
using Fp8Plan = ChunkPlan<kHeadDim, 4, kFragments, true, E4m3>;

}  // namespace

int fp8_chunk_attention(const PagedAttentionParams& p, void* stream) {
  switch (p.head_dim) {
    case 64:
      return launch_plans<Fp8Plan<64, 2>, Fp8Plan<64, 1>>(p, stream);
    case 96:
      return launch_plans<Fp8Plan<96, 2>, Fp8Plan<96, 1>>(p, stream);
    case 128:
      return launch_plans<Fp8Plan<128, 2>, Fp8Plan<128, 1>>(p, stream);
    default:
      return cudaErrorInvalidValue;  // plan_attention() chooses others
  }
}

}  // namespace photon::cuda
