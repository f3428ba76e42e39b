// The Hopper kernels of the linears of a batch of tokens. `batch_misfit(p)`: why they do not take
// these params, here and now; null: they do.
#pragma once
#include "common/params.h"

namespace photon::cuda {

const char* batch_misfit(const LinearParams& p);
const char* batch_misfit(const SwigluParams& p);
const char* batch_misfit(const LinearNormParams& p);

int batch_linear(const LinearParams& p, void* stream);
int batch_swiglu(const SwigluParams& p, void* stream);
int batch_linear_norm(const LinearNormParams& p, void* stream);

}  // namespace photon::cuda
