// The launchers of adapters; see cuda/kernels.h.
#pragma once
#include "common/lora.h"

namespace photon::cuda {

int lora_shrink(const LoraShrinkParams& p, void* stream);
int lora_expand(const LoraExpandParams& p, void* stream);
int lora_link(const LoraLinkParams& p, void* stream);

}  // namespace photon::cuda
