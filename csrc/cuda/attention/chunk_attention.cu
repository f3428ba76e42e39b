#include "cuda/attention/chunk_attention.h"

#include "cuda/attention/chunk_kernel.cuh"

namespace photon::cuda {

int chunk_attention(const PagedAttentionParams& p, void* stream) {
  switch (p.head_dim) {
    case 64:
      return launch_plans<ChunkPlan<64, 4, 2>, ChunkPlan<64, 4, 1>>(p, stream);
    case 96:
      return launch_plans<ChunkPlan<96, 4, 2>, ChunkPlan<96, 4, 1>>(p, stream);
    case 128:
      return launch_plans<ChunkPlan<128, 4, 2>, ChunkPlan<128, 4, 1>>(p, stream);
    case 256:
      return launch_plans<ChunkPlan<256, 8, 1>, ChunkPlan<256, 4, 1>>(p, stream);
    default:
      return cudaErrorInvalidValue;  // plan_attention() chooses others
  }
}

}  // namespace photon::cuda
