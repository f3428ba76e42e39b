// The narrow linears of weights of fewer bits: which load stage a format has.
#include "cuda/linear/narrow_stored.cuh"
#include "cuda/linear/stream_linear.h"

namespace photon::cuda {

int run_narrow_stored(const LinearParams& op, void* stream) {
  using namespace stream_linear;
  using narrow::Fp8Load, narrow::Int8Load;
  if (op.weight.format == WeightFormat::kFp8) return launch_stored<Fp8Load, Fp8Load>(op, stream);
  if (op.weight.format == WeightFormat::kInt4) return run_narrow_int4(op, stream);
  return narrow::with_int8_kind(op.weight.scales, [&](auto kind) {
    using Load = Int8Load<decltype(kind)::kGroups>;
    return launch_stored<Load, Load>(op, stream);
  });
}

}  // namespace photon::cuda
