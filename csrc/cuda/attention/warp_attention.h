// Split attention of many tokens: see warp_attention.cu.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// Whether lone warps take this call, which fits split attention (split_attention.h): more than 96
// tokens (or, for a batch, more than 32, and queries, keys and values of whole 16-byte vectors),
// heads of 128, up to 4 query heads of a KV head, pages of whole tiles of 16 positions (or rows
// that are one page each), and strides of a tensor's rows.
bool warp_attention_fits(const FusedAttentionDecodeParams& p);

int warp_attention(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
