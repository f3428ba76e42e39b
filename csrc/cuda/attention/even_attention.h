// Attention of chunks of tokens by warpgroups, the work dealt evenly to all SMs.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// For which plan_attention() chose kEven. How the contexts of a step are cut depends on all of
// them: a token's bits are the same in steps that are alike, and in no others.
int even_attention(const PagedAttentionParams& p, void* stream);

}  // namespace photon::cuda
