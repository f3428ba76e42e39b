#include "cuda/attention/fp8_attention.h"

#include "cuda/attention/portable_attention.cuh"

namespace photon::cuda {
namespace {

template <typename Params>
int launch_fp8(const Params& p, void* stream) {
  return with_dtype(p.dtype, [&](auto tag) {
    return launch_attention<typename decltype(tag)::type, E4m3>(p, stream);
  });
}

}  // namespace

int fp8_attention(const PagedAttentionParams& p, void* stream) { return launch_fp8(p, stream); }

int fp8_attention(const FusedAttentionDecodeParams& p, void* stream) {
  return launch_fp8(p, stream);
}

}  // namespace photon::cuda
