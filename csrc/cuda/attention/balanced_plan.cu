// The plan of a step of balanced_attention (common/balanced_plan.h): one CTA lists the query tiles,
// and a thread for each CTA of the attention finds what that one does.
//
// It does not let the next kernel start. So all kernels of the step begin when the plan is
// complete, and may read it, as they do decode_meta, before they wait (see split_kernel.cuh).
#include "cuda/attention/balanced_attention.h"
#include "cuda/attention/balanced_cut.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {
namespace {

constexpr int kPlanThreads = 1024;

__device__ void write_query_tiles(const QueryTiles& from, const StepPlan& plan) {
  for (int i = threadIdx.x; i < from.count; i += kPlanThreads) plan.tiles[i] = from.tiles[i];
}

// All threads of the CTA must call it.
__device__ void write_ctas(const QueryTiles& query_tiles, const PlanSizes& sizes,
                           const StepPlan& plan) {
  const WorkCut cut(query_tiles, sizes.kv_heads, sizes.ctas);
  for (int first = 0; first < sizes.ctas; first += kPlanThreads) {
    const int cta = first + static_cast<int>(threadIdx.x);
    const CtaPlan own = cut.of_cta(min(cta, sizes.ctas - 1));
    if (cta < sizes.ctas) plan.ctas[cta] = own;
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    balanced_plan_kernel(const __grid_constant__ PagedAttentionParams p, int ctas) {
  if constexpr (kHopperCode) {
    auto& query_tiles = *reinterpret_cast<QueryTiles*>(dynamic_shared());
    const PlanSizes sizes = plan_sizes(p, ctas);
    const StepPlan plan(p.plan, sizes);
    wait_for_earlier();
    list_query_tiles<kPlanThreads>(StepTokens(p), query_tiles);
    if (threadIdx.x == 0) *plan.sizes = sizes;
    write_query_tiles(query_tiles, plan);
    write_ctas(query_tiles, sizes, plan);
  }
}

}  // namespace

int balanced_plan(const PagedAttentionParams& p, void* stream) {
  LaunchShape shape = waiting_shape(1, kPlanThreads);
  shape.shared_bytes = sizeof(QueryTiles);
  const int ctas = static_cast<int>(balanced_ctas(sms(), p.workspace_words, p.head_dim));
  return launch(balanced_plan_kernel, shape, stream, p, ctas);
}

}  // namespace photon::cuda
