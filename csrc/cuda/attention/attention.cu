// Which kernel runs of paged_attention and of fused_attention_decode; and the portable one of keys
// and values of the op's dtype.
#include "common/attention_plan.h"
#include "common/fallbacks.h"
#include "cuda/attention/balanced_attention.h"
#include "cuda/attention/chunk_attention.h"
#include "cuda/attention/fp8_attention.h"
#include "cuda/attention/portable_attention.cuh"
#include "cuda/attention/split_attention.h"
#include "cuda/attention/warp_attention.h"
#include "cuda/kernels.h"

namespace photon::cuda {
namespace {

template <typename Params>
int portable_attention(const Params& p, void* stream) {
  if (p.cache.scales != nullptr) return fp8_attention(p, stream);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_attention<T, T>(p, stream);
  });
}

}  // namespace

int chunk_plan(const PagedAttentionParams& p, void* stream) {
  if (p.tokens == 0 || p.q_heads == 0) return 0;
  const bool is_read = plan_attention(p, current_gpu()).kernel == AttentionKernel::kBalanced;
  return is_read ? balanced_plan(p, stream) : 0;
}

int paged_attention(const PagedAttentionParams& p, void* stream) {
  if (p.tokens == 0 || p.q_heads == 0) return 0;
  const KernelChoice<AttentionKernel> choice = plan_attention(p, current_gpu());
  switch (choice.kernel) {
    case AttentionKernel::kBalanced:
      return balanced_attention(p, stream);
    case AttentionKernel::kChunk:
      return p.cache.scales != nullptr ? fp8_chunk_attention(p, stream)
                                       : chunk_attention(p, stream);
    default:
      if (choice.why) fallbacks().note({"paged_attention_into", choice.why.reason});
      return portable_attention(p, stream);
  }
}

int fused_attention_decode(const FusedAttentionDecodeParams& p, void* stream) {
  if (p.tokens == 0 || p.q_heads == 0) return 0;
  const KernelChoice<AttentionKernel> choice = plan_attention(p, current_gpu());
  switch (choice.kernel) {
    case AttentionKernel::kSplit:
      return p.cache.scales != nullptr ? fp8_split_attention(p, stream)
                                       : split_attention(p, stream);
    case AttentionKernel::kWarp:
    case AttentionKernel::kBatchWarp:
      return warp_attention(p, stream);
    default:
      if (choice.why) fallbacks().note({"fused_attention_decode_into", choice.why.reason});
      return portable_attention(p, stream);
  }
}

}  // namespace photon::cuda
