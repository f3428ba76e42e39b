// Attention of chunks of tokens over their paged context, for steps whose bits may depend on what
// else is in them. A CTA stays for the whole launch: it takes an equal share of the step's work
// (even_parts.cuh), part by part. One warpgroup copies queries, keys and values (even_tile.cuh),
// two multiply (even_softmax.cuh), and what several CTAs have of one context is added up at the end
// (even_merge.cuh).
//
// With pdl, a CTA finds its share, and the first pages of it, before wait_for_earlier(): of
// decode_meta, counts and the page table, by plain loads (see split_attention.cu).
#include "cuda/attention/even_attention.h"

#include <algorithm>

#include "common/attention_plan.h"
#include "cuda/attention/even_merge.cuh"

namespace photon::cuda {
namespace {

template <typename Plan>
__device__ void init_barriers(EvenShared<Plan>& shared) {
  constexpr int kWarps = kConsumers * kGroupWarps;
  for (int i = 0; i < kEvenStages; ++i) {
    init_barrier(&shared.has_keys[i], kGroupWarps);
    init_barrier(&shared.has_values[i], kGroupWarps);
    init_barrier(&shared.has_queries[i], kWarpgroupThreads);
    init_barrier(&shared.keys_read[i], kWarps);
    init_barrier(&shared.values_read[i], kWarps);
    init_barrier(&shared.queries_read[i], kConsumers * kWarpgroupThreads);
  }
  init_barrier(&shared.has_raw_values, kGroupWarps);
  fence_barriers();
}

// One warpgroup writes zeros for the dead tokens that fall to its CTA: CTAs take tokens by turns.
template <typename Plan>
__device__ void clear_dead_tokens(const PagedAttentionParams& p, const StepTokens& tokens) {
  const int ctas = static_cast<int>(gridDim.x), lane = threadIdx.x % kWarpSize,
            warp = threadIdx.x / kWarpSize;
  for (int base = tokens.first + static_cast<int>(blockIdx.x) + warp * kWarpSize * ctas;
       base < tokens.end; base += kWarpgroupThreads * ctas) {
    const int own = base + lane * ctas;
    unsigned dead = __ballot_sync(kFullWarp, own < tokens.end && tokens.context(own).row == kNoRow);
    for (; dead != 0; dead &= dead - 1) {
      Bf16* const out =
          static_cast<Bf16*>(p.out) + (base + (__ffs(dead) - 1) * ctas) * p.out_stride;
      for (int i = lane; i < p.q_heads * Plan::kVectors; i += kWarpSize) {
        *reinterpret_cast<uint4*>(out + i / Plan::kVectors * p.out_head_stride +
                                  i % Plan::kVectors * 8) = uint4{};
      }
    }
  }
}

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    even_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                          const __grid_constant__ TileTensors tensors) {
  if constexpr (kHopperCode) {
    auto& shared = *reinterpret_cast<EvenShared<Plan>*>(dynamic_shared());
    if (threadIdx.x == 0) {
      init_barriers(shared);
      prefetch_half_tile_map(tensors.k_map);
      prefetch_half_tile_map(tensors.v_map);
    }
    const StepTokens tokens(p);
    list_items<Plan::kThreads>(tokens, shared.items);
    const Share share(shared.items, static_cast<int>(p.kv_heads), static_cast<int>(blockIdx.x),
                      static_cast<int>(gridDim.x));
    if (threadIdx.x < kWarpgroupThreads) {
      shrink_registers<72>();
      produce(p, tensors, tokens, share, shared);
      clear_dead_tokens<Plan>(p, tokens);
    } else {
      grow_registers<216>();
      consume(p, tokens, share, shared);
    }
  }
}

template <typename Plan>
int launch_even(const PagedAttentionParams& p, void* stream) {
  const int64_t ctas = std::min<int64_t>(sms(), p.workspace_words / Workspace<Plan>::kWords);
  LaunchShape shape{ctas, Plan::kThreads, sizeof(EvenShared<Plan>)};
  shape.pdl = p.pdl;
  TileTensors tensors(p.cache);
  if (const int error = tensors.make_maps(p.cache, 1)) return error;
  return launch(even_attention_kernel<Plan>, shape, stream, p, tensors);
}

static_assert(kEvenTokens == kMostItems && kEvenTileKeys == kUnitKeys &&
              kEvenPartTiles == kPartCost && kCopyTokens == kRunTokens);

}  // namespace

int even_attention(const PagedAttentionParams& p, void* stream) {
  return p.head_dim == 64 ? launch_even<EvenPlan<64>>(p, stream)
                          : launch_even<EvenPlan<128>>(p, stream);
}

}  // namespace photon::cuda
