// The Hopper kernel of fused_attention_decode: see split_kernel.cuh.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// For which plan_attention() chose kSplit.
int split_attention(const FusedAttentionDecodeParams& p, void* stream);

// The same of keys and values in fp8.
int fp8_split_attention(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
