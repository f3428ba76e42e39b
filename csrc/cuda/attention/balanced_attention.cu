// Attention of chunks of tokens over their paged context. A CTA stays for the whole launch: its
// range is an equal part of the step's work, or it takes one item after the other of an exact step,
// in which no token's bits depend on what else is there (balanced_work.cuh). One warpgroup copies
// queries, keys and values (balanced_producer.cuh), two multiply (balanced_consumer.cuh), and what
// several CTAs have of one context is added up at the end (balanced_reduction.cuh).
//
// With pdl, a CTA reads its part of the step's plan, and looks up its first pages, before
// wait_for_earlier(): by plain loads of the plan, decode_meta, counts and the page table (see
// split_kernel.cuh).
#include "cuda/attention/balanced_attention.h"

#include "common/attention_plan.h"
#include "cuda/attention/balanced_consumer.cuh"
#include "cuda/attention/balanced_producer.cuh"

namespace photon::cuda {
namespace {

template <typename Plan>
__device__ void init_barriers(BalancedShared<Plan>& shared) {
  constexpr int kWarps = kConsumers * kGroupWarps;
  for (int i = 0; i < kBalancedStages; ++i) {
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

// What this CTA does: nothing, by the plan of another call.
__device__ CtaPlan read_plan(const StepPlan& plan, const PlanSizes& sizes) {
  const PlanSizes made_for = *plan.sizes;
  CtaPlan own = plan.ctas[blockIdx.x];
  if (!made_for.are(sizes)) own = {};
  return own;
}

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    balanced_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                              const __grid_constant__ TileTensors tensors) {
  if constexpr (kHopperCode) {
    auto& shared = *reinterpret_cast<BalancedShared<Plan>*>(dynamic_shared());
    if (threadIdx.x == 0) {
      init_barriers(shared);
      prefetch_row_tile_map(tensors.k_map);
      prefetch_row_tile_map(tensors.v_map);
    }
    const StepTokens tokens(p);
    const PlanSizes sizes = plan_sizes(p, static_cast<int>(gridDim.x));
    const StepPlan plan(p.plan, sizes);
    const CtaPlan own = read_plan(plan, sizes);
    const CtaWork<Plan> work(plan.tiles, sizes.kv_heads, own.rest);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < kWarpgroupThreads) {
      shrink_registers<72>();
      produce(p, tensors, own.first, work, tokens.sharers, shared);
      clear_dead_tokens<Plan>(p, tokens);
    } else {
      grow_registers<216>();
      consume(p, tokens, own.first, work, shared);
    }
  }
}

template <typename Plan>
int launch_balanced(const PagedAttentionParams& p, void* stream) {
  LaunchShape shape{balanced_ctas(sms(), p.workspace_words, p.head_dim, p.exact), Plan::kThreads,
                    sizeof(BalancedShared<Plan>)};
  shape.pdl = p.pdl;
  TileTensors tensors(p.cache);
  if (const int error = tensors.make_maps(p.cache, 1)) return error;
  return launch(balanced_attention_kernel<Plan>, shape, stream, p, tensors);
}

static_assert(kBalancedTileKeys == kTileKeys && kBalancedTileCost == kPartialCost &&
              kCopyTokens == kRunTokens);

}  // namespace

int balanced_attention(const PagedAttentionParams& p, void* stream) {
  if (p.head_dim == 64)
    return p.exact ? launch_balanced<BalancedPlan<64, true>>(p, stream)
                   : launch_balanced<BalancedPlan<64, false>>(p, stream);
  return p.exact ? launch_balanced<BalancedPlan<128, true>>(p, stream)
                 : launch_balanced<BalancedPlan<128, false>>(p, stream);
}

}  // namespace photon::cuda
