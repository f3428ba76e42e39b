// Attention of chunks of tokens by matrix instructions.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// For which plan_attention() chose kChunk. Where the Hopper kernels run (hopper_runs()), the CTAs
// of a cluster share a context of more than 1,024 positions. A token's bits depend on its query,
// its context and nothing else in the step.
int chunk_attention(const PagedAttentionParams& p, void* stream);

// The same of keys and values in fp8.
int fp8_chunk_attention(const PagedAttentionParams& p, void* stream);

}  // namespace photon::cuda
