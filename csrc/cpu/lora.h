// The CPU kernels of adapters; see cpu/kernels.h.
#pragma once
#include "common/lora.h"

namespace photon::cpu {

void lora_shrink(const LoraShrinkParams& p);
void lora_expand(const LoraExpandParams& p);

void lora_norm_linear(const LoraNormLinearParams& p);
void lora_linear_residual(const LoraResidualParams& p);
void lora_norm_swiglu(const LoraNormSwigluParams& p);

}  // namespace photon::cpu
