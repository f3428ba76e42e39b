// The Hopper kernels of the linears of a batch of tokens.
#pragma once
#include "common/linear.h"

namespace photon::cuda {

// For which plan_linear() chose kBatch.
int run_batch_linear(const LinearParams& p, void* stream);

// For which it chose kBatchStored.
int run_batch_stored(const LinearParams& p, void* stream);

// For which it chose kBatchFp8.
int run_batch_fp8(const LinearParams& p, void* stream);

// Adds up the sums of `splits` parts of the columns that a linear with Epilogue::kAddNorm has left
// in its workspace, and does the rest of it.
int run_sum_norm(const LinearParams& p, int splits, void* stream);

}  // namespace photon::cuda
