// The plan of a step of balanced_attention (common/balanced_plan.h): one CTA lists the query tiles,
// and a thread for each CTA of the attention finds what that one does.
//
// It does not let the next kernel start. So all kernels of the step begin when the plan is
// complete, and may read it, as they do decode_meta, before they wait (see split_kernel.cuh).
#include "cuda/attention/balanced_attention.h"
#include "cuda/attention/balanced_cut.cuh"
#include "cuda/attention/balanced_items.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {
namespace {

constexpr int kPlanThreads = 1024;

__device__ void write_query_tiles(const QueryTiles& from, const StepPlan& plan) {
  for (int i = threadIdx.x; i < from.count; i += kPlanThreads) plan.tiles[i] = from.tiles[i];
}

// Whether the items of an exact step are parts of query tiles. These stay whole where they are
// enough for half of the CTAs, or their parts too many for the workspace, or to be listed.
__device__ bool are_spread(const QueryTiles& from, const PlanSizes& sizes) {
  return 2 * from.count * sizes.kv_heads <= sizes.ctas &&
         from.places * sizes.kv_heads <= sizes.ctas * kSpreadSlots &&
         from.count + from.places <= kMaxQueryTiles;
}

// The last query tiles first, which as a rule have the longest contexts.
__device__ void write_whole(const QueryTiles& from, const StepPlan& plan) {
  for (int i = threadIdx.x; i < from.count; i += kPlanThreads) {
    QueryTile tile = from.tiles[i];
    tile.before = 0;
    tile.upto = count_kv_tiles(tile.lengths);
    plan.tiles[from.count - 1 - i] = tile;
  }
}

// Lists the parts of all query tiles behind these. All threads of the CTA must call it.
__device__ QueryTile* list_parts(QueryTiles& from) {
  QueryTile* const found = from.tiles + from.count;
  for (int i = threadIdx.x; i < from.count; i += kPlanThreads) {
    QueryTile tile = from.tiles[i];
    const int kv_tiles = count_kv_tiles(tile.lengths), parts = count_parts(kv_tiles);
    tile.place = tile.before;
    for (int part = 0; part < parts; ++part) {
      tile.before = part_begin(part);
      tile.upto = part + 1 < parts ? part_begin(part + 1) : kv_tiles;
      found[tile.place + part] = tile;
    }
  }
  __syncthreads();
  return found;
}

// The longest parts first. All threads of the CTA must call it.
__device__ void write_parts(QueryTiles& from, const StepPlan& plan) {
  const QueryTile* const parts = list_parts(from);
  for (int i = threadIdx.x; i < from.places; i += kPlanThreads) {
    const int own = parts[i].upto - parts[i].before;
    int earlier = 0;
    for (int j = 0; j < from.places; ++j) {
      const int other = parts[j].upto - parts[j].before;
      earlier += other > own || (other == own && j > i);
    }
    plan.tiles[earlier] = parts[i];
  }
}

// Each CTA begins with an item of its own. All threads of the CTA must call it.
__device__ void write_items(QueryTiles& query_tiles, const PlanSizes& sizes, const StepPlan& plan) {
  const bool spreads = are_spread(query_tiles, sizes);
  const int entries = spreads ? query_tiles.places : query_tiles.count;
  const LineRange all = {0, 0, entries * sizes.kv_heads, 0};
  if (spreads) {
    write_parts(query_tiles, plan);
  } else {
    write_whole(query_tiles, plan);
  }
  __syncthreads();  // the entries are there
  const Items items(plan.tiles, sizes.kv_heads, all);
  for (int cta = threadIdx.x; cta < sizes.ctas; cta += kPlanThreads)
    plan.ctas[cta] = {items.of(cta), all};
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
