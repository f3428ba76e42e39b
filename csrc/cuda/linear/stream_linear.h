// The Hopper kernels of the linears whose order of summation is settled.
#pragma once
#include "common/linear_plan.h"

namespace photon::cuda {

// For which plan_linear() chose `kernel`: kNarrow, kMid or kLarge.
int run_stream_linear(const LinearParams& p, LinearKernel kernel, void* stream);

// Of a weight of fewer bits, for which it chose kNarrow.
int run_narrow_stored(const LinearParams& p, void* stream);

// Of a weight of fewer bits, for which it chose kMidStored.
int run_mid_stored(const LinearParams& p, void* stream);

}  // namespace photon::cuda
