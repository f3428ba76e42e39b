// Attention of chunks of tokens by warpgroups, the work dealt evenly to all SMs.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// For which plan_attention() chose kBalanced. How the contexts of a step are cut depends on all of
// them: a token's bits are the same in steps that are alike, and in no others. With `exact` they
// are cut by position alone, and bits depend on the token's own context.
int balanced_attention(const PagedAttentionParams& p, void* stream);

// Writes the plan that it reads, of these params but for the queries, keys and values of a layer.
int balanced_plan(const PagedAttentionParams& p, void* stream);

}  // namespace photon::cuda
