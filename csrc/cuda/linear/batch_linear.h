// The Hopper kernels of the linears of a batch of tokens.
#pragma once
#include "common/linear.h"

namespace photon::cuda {

// For which plan_linear() chose kBatch.
int run_batch_linear(const LinearParams& p, void* stream);

}  // namespace photon::cuda
