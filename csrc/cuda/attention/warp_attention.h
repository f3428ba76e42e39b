// Split attention of many tokens: see warp_attention.cu.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// For which plan_attention() chose kWarp, or kBatchWarp for a batch.
int warp_attention(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
