// From logits to tokens: apply_token_mask and sample.
#include <cmath>

#include "common/fallbacks.h"
#include "common/mask.h"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/sampling/sample_rows.h"

namespace photon::cuda {
namespace {

constexpr int kMaskThreads = 256;
constexpr int64_t kMaskChunk = 4096;  // ids per CTA

template <typename T>
__global__ void __launch_bounds__(kMaskThreads)
    apply_token_mask_kernel(const ApplyTokenMaskParams p, int64_t chunks) {
  const int64_t r = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const MaskVerdict verdict = judge_mask(p, r);
  if (chunk == 0 && threadIdx.x == 0) p.row_errors[r] = verdict.error;
  if (verdict.mask == nullptr) return;
  T* logits = static_cast<T*>(p.logits) + r * p.logits_stride;
  const int64_t end = (chunk + 1) * kMaskChunk < p.vocab ? (chunk + 1) * kMaskChunk : p.vocab;
  for (int64_t id = chunk * kMaskChunk + threadIdx.x; id < end; id += kMaskThreads) {
    const int64_t word = id / 32;
    const bool allowed =
        word < p.mask_words && (static_cast<uint32_t>(verdict.mask[word]) >> (id % 32) & 1u) != 0;
    if (!allowed) logits[id] = from_float<T>(-INFINITY);
  }
}

}  // namespace

int apply_token_mask(const ApplyTokenMaskParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  const int64_t chunks = p.vocab > 0 ? ceil_div(p.vocab, kMaskChunk)
                                     : 1;  // row_errors is written even for an empty vocabulary
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(apply_token_mask_kernel<T>, p.num_segments * chunks, kMaskThreads, stream, p,
                  chunks);
  });
}

int sample(const SampleParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool in_clusters =
        p.hopper && runs_hopper("sample_into", hopper_unsupported(current_gpu()));
    return sample_rows<T>(p, in_clusters, stream);
  });
}

}  // namespace photon::cuda
