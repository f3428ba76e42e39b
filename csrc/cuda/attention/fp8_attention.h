// The portable kernels of attention over keys and values in fp8.
#pragma once
#include "common/params.h"

namespace photon::cuda {

int fp8_attention(const PagedAttentionParams& p, void* stream);
int fp8_attention(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
