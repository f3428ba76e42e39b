// The launcher of the Hopper linears for many tokens (large_linear.cuh), which stream_linear.cu
// calls.
#pragma once
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear {

// `p` describes all tokens; split and k_each are chosen, maps are not made. `workspace`: for
// kOutput, what linear_workspace_words() says; else not used.
template <Epilogue kEpilogue>
int launch_large(const Params& p, const Bf16* weight, int64_t weight_stride, float* workspace,
                 bool pdl, void* stream);

}  // namespace photon::cuda::stream_linear
