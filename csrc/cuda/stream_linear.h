// The Hopper kernels of the fused linears. `streams(p)`: whether they take these params, here and
// now; else the portable kernels run.
#pragma once
#include "common/params.h"

namespace photon::cuda {

bool streams(const NormLinearParams& p);
bool streams(const LinearResidualParams& p);
bool streams(const NormSwigluParams& p);

int stream_norm_linear(const NormLinearParams& p, void* stream);
int stream_linear_residual(const LinearResidualParams& p, void* stream);
int stream_norm_swiglu(const NormSwigluParams& p, void* stream);

}  // namespace photon::cuda
