// Attention of chunks of tokens by matrix instructions: what paged_attention runs for
// PagedAttentionParams::hopper where it fits.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// Why it cannot compute this call; null: it can. It takes bfloat16, head_dim 64, 96, 128 or 256, at
// most 64 query heads a KV head, pointers and strides that are all whole 16-byte vectors, scale >
// 0, a cache that has pages, tokens and positions of a row that int counts, and a current device of
// compute capability 8.0 or above with room for a tile.
const char* chunk_attention_misfit(const PagedAttentionParams& p);

// Where the Hopper kernels run (hopper_runs()), the CTAs of a cluster share a context of more than
// 1,024 positions. A token's bits depend on its query, its context and nothing else in the step.
int chunk_attention(const PagedAttentionParams& p, void* stream);

}  // namespace photon::cuda
