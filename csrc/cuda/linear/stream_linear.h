// The Hopper kernels of the fused linears. `stream_misfit(p)`: why they do not take these params,
// here and now; null: they do.
#pragma once
#include "common/params.h"

namespace photon::cuda {

const char* stream_misfit(const NormLinearParams& p);
const char* stream_misfit(const LinearResidualParams& p);
const char* stream_misfit(const NormSwigluParams& p);

int stream_norm_linear(const NormLinearParams& p, void* stream);
int stream_linear_residual(const LinearResidualParams& p, void* stream);
int stream_norm_swiglu(const NormSwigluParams& p, void* stream);

}  // namespace photon::cuda
