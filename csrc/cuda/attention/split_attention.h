// The Hopper kernel of fused_attention_decode: see split_attention.cu.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// Why the split kernel cannot compute this call; null: it can. It takes bfloat16, head_dim 64, 96,
// 128 or 256, a cache and an output of whole 16-byte vectors, a cos/sin cache, norm weights and a
// workspace that begin with one, sizes that 32 bits index, and a device that runs Hopper kernels.
const char* split_attention_misfit(const FusedAttentionDecodeParams& p);

int split_attention(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
