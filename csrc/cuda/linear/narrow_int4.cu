// The narrow linears of weights in int4.
#include "cuda/linear/narrow_stored.cuh"

namespace photon::cuda::stream_linear {
namespace {

using narrow::Int4Load, narrow::Zeros;

template <int kGroups, Zeros kZeros>
int launch_int4(const LinearParams& op, void* stream) {
  return launch_stored<Int4Load<kGroups, 2, kZeros>, Int4Load<kGroups, 1, kZeros>>(op, stream);
}

}  // namespace

int run_narrow_int4(const LinearParams& op, void* stream) {
  const WeightScales& scales = op.weight.scales;
  if (scales.offsets != nullptr) return launch_int4<4, Zeros::kOffsets>(op, stream);
  const bool has_points = scales.zeros != nullptr;
  if (scales.columns < kScaleBlock)
    return has_points ? launch_int4<4, Zeros::kPoints>(op, stream)
                      : launch_int4<4, Zeros::kNone>(op, stream);
  return has_points ? launch_int4<1, Zeros::kPoints>(op, stream)
                    : launch_int4<1, Zeros::kNone>(op, stream);
}

}  // namespace photon::cuda::stream_linear
