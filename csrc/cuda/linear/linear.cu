// Every linear: which kernel runs (common/linear_plan.h), and its launch.
#include "common/fallbacks.h"
#include "common/linear_plan.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/batch_linear.h"
#include "cuda/linear/linear_tile.h"
#include "cuda/linear/stream_linear.h"

namespace photon::cuda {

bool has_hopper() { return hopper_runs(); }

const char* fp8_tokens_refused(const LinearParams& p) {
  if (p.backend == Backend::kPortable) return "hopper is not asked for";
  const KernelChoice<LinearKernel> choice = plan_linear(p, current_gpu());
  return choice.kernel == LinearKernel::kBatchFp8 ? nullptr : choice.why.reason;
}

int linear(const LinearParams& p, void* stream) {
  if (p.tokens == 0 || p.outputs() == 0) return 0;
  const KernelChoice<LinearKernel> choice = plan_linear(p, current_gpu());
  switch (choice.kernel) {
    case LinearKernel::kTile:
      if (p.x_scales != nullptr) return cudaErrorNotSupported;  // csrc/ops/linear.cpp asks first
      if (choice.why) fallbacks().note({linear_op(p), choice.why.reason});
      if (p.weight.format != WeightFormat::kDense) return run_stored_linear(p, stream);
      return p.prologue == Prologue::kNone ? run_tile_linear(p, stream)
                                           : run_tile_norm_linear(p, stream);
    case LinearKernel::kBatch:
      return run_batch_linear(p, stream);
    case LinearKernel::kBatchStored:
      return run_batch_stored(p, stream);
    case LinearKernel::kBatchFp8:
      return run_batch_fp8(p, stream);
    case LinearKernel::kMidStored:
      return run_mid_stored(p, stream);
    default:
      if (p.weight.format != WeightFormat::kDense) return run_narrow_stored(p, stream);
      return run_stream_linear(p, choice.kernel, stream);
  }
}

}  // namespace photon::cuda
