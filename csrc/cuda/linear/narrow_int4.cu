// The narrow linears of weights in int4.
#include "cuda/linear/narrow_stored.cuh"

namespace photon::cuda::stream_linear {

int run_narrow_int4(const LinearParams& op, void* stream) {
  return narrow::with_int4_kind(op.weight.scales, [&](auto kind) {
    using Kind = decltype(kind);
    return launch_stored<narrow::Int4Load<Kind::kGroups, 2, Kind::kZeros>,
                         narrow::Int4Load<Kind::kGroups, 1, Kind::kZeros>>(op, stream);
  });
}

}  // namespace photon::cuda::stream_linear
