// The CPU kernels of adapters; see cpu/kernels.h.
#pragma once
#include "common/lora.h"

namespace photon::cpu {

void lora_shrink(const LoraShrinkParams& p);
void lora_expand(const LoraExpandParams& p);
void lora_link(const LoraLinkParams& p);

}  // namespace photon::cpu
