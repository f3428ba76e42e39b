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

// Of an exact step: how its query tiles become items.
struct ExactCut {
  int entries;  // items of one KV head
  bool spreads;

  // Query tiles stay whole where they are enough for half of the CTAs, or their parts too many for
  // the workspace.
  __device__ ExactCut(const QueryTiles& from, const PlanSizes& sizes)
      : spreads(2 * from.count * sizes.kv_heads <= sizes.ctas &&
                from.places * sizes.kv_heads <= sizes.ctas * kSpreadSlots) {
    entries = spreads ? from.places : from.count;
  }
};

__device__ void write_entries(const QueryTiles& from, const ExactCut& cut, const StepPlan& plan) {
  for (int i = threadIdx.x; i < from.count; i += kPlanThreads) {
    QueryTile tile = from.tiles[i];
    const int first = tile.before, kv_tiles = count_kv_tiles(tile.lengths),
              parts = cut.spreads ? count_parts(kv_tiles) : 1;
    for (int part = 0; part < parts; ++part) {
      tile.before = part_begin(part);
      tile.upto = part + 1 < parts ? part_begin(part + 1) : kv_tiles;
      plan.tiles[cut.spreads ? first + part : i] = tile;
    }
  }
}

// Each CTA begins with an item of its own. All threads of the CTA must call it.
__device__ void write_items(const QueryTiles& query_tiles, const PlanSizes& sizes,
                            const StepPlan& plan) {
  const ExactCut cut(query_tiles, sizes);
  const LineRange all = {cut.entries, 0, cut.entries * sizes.kv_heads, 0};
  write_entries(query_tiles, cut, plan);
  __syncthreads();  // the entries are there
  const CtaRange range(plan.tiles, sizes.kv_heads, all);
  for (int cta = threadIdx.x; cta < sizes.ctas; cta += kPlanThreads)
    plan.ctas[cta] = {range.item(cta), all};
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
    list_query_tiles<kPlanThreads>(StepTokens(p), p.exact, query_tiles);
    if (threadIdx.x == 0) *plan.sizes = sizes;
    if (p.exact) {
      write_items(query_tiles, sizes, plan);
    } else {
      write_query_tiles(query_tiles, plan);
      write_ctas(query_tiles, sizes, plan);
    }
  }
}

}  // namespace

int balanced_plan(const PagedAttentionParams& p, void* stream) {
  LaunchShape shape = waiting_shape(1, kPlanThreads);
  shape.shared_bytes = sizeof(QueryTiles);
  const int ctas = static_cast<int>(balanced_ctas(sms(), p.workspace_words, p.head_dim, p.exact));
  return launch(balanced_plan_kernel, shape, stream, p, ctas);
}

}  // namespace photon::cuda
