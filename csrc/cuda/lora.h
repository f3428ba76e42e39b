// The launchers of adapters; see cuda/kernels.h.
#pragma once
#include "common/lora.h"

namespace photon::cuda {

int lora_shrink(const LoraShrinkParams& p, void* stream);
int lora_expand(const LoraExpandParams& p, void* stream);

int lora_norm_linear(const LoraNormLinearParams& p, void* stream);
int lora_linear_residual(const LoraResidualParams& p, void* stream);
int lora_norm_swiglu(const LoraNormSwigluParams& p, void* stream);

}  // namespace photon::cuda
