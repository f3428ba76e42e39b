// Attention of chunks of tokens by warpgroups, the work dealt evenly to all SMs: what
// paged_attention runs for PagedAttentionParams::hopper where it is given a workspace and fits.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// Why it cannot compute this call; null: it can. Besides what chunk_attention asks: head_dim 64 or
// 128, at most 4,096 tokens, whose contexts could be so many that int counts their tiles, and a
// current device that runs the Hopper kernels (hopper_runs()).
const char* even_attention_misfit(const PagedAttentionParams& p);

// How the contexts of a step are cut depends on all of them: a token's bits are the same in steps
// that are alike, and in no others.
int even_attention(const PagedAttentionParams& p, void* stream);

}  // namespace photon::cuda
