// fused_attention_decode for Hopper and later: a line's past is cut into splits that depend on its length alone (common/kv_split.h). A
// block takes a run of them, one where there are few lines; the last block of a line's runs to finish merges the splits in order. So one
// line keeps the whole device busy, many lines cost no more merging than they must, and a line's bits are the same whichever step it rides
// in. After flash-decoding (Dao et al., 2023).
//
// A kernel of a chain: before wait_for_earlier() it reads decode_meta, the page table and old positions of the cache, which is most of what
// it reads at all.
#include "cuda/attend.cuh"
#include "cuda/launch.cuh"
#include "cuda/split_attention.h"
#include "cuda/split_work.cuh"

namespace photon::cuda {
namespace {

constexpr int kQuad = 4;          // floats of one access
constexpr int kMergedAtOnce = 4;  // splits in flight

// Blocks of a multiprocessor: as many as have registers.
constexpr int split_blocks(int head_dim, int columns) { return head_dim <= 64 && columns == 1 ? 3 : 2; }

// Tiles of a warp's step: two where there are registers for them.
PHOTON_HOST_DEVICE constexpr int step_tiles(int head_dim, int columns) { return head_dim <= 128 && columns == 1 ? 2 : 1; }

// What a split leaves for the merge: of each query head the sums, which are of exp2(score - high) * v, and what they weigh.
struct Partials {
  float* sums;        // [lines * q_heads, splits, head_dim]
  Weight* weights;    // [lines * q_heads, splits]
  unsigned* arrived;  // [teams]; zero between calls
};

// Where those of a head of the run begin, in splits.
__device__ int64_t partials_of(const SplitGrid& grid, const Run& run, int head) {
  return static_cast<int64_t>(run.line * grid.q_heads + run.first_head + head) * grid.splits.of;
}

// body(head of the run, first dim, its number) for each quad of a run's results, one a thread at a time, and always the same thread.
template <int kHeadDim, typename Body>
__device__ void for_quads(int heads, const Body& body) {
  constexpr int kQuads = kHeadDim / kQuad;
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * kQuads; i += kSplitThreads) body(i / kQuads, i % kQuads * kQuad, i);
}

__device__ void write_quad(const SplitGrid& grid, const Run& run, int head, int dim, const QuadSoftmax& quad) {
  const float share = quad.weight.sum == 0.0f ? 0.0f : 1.0f / quad.weight.sum;
  const float4 v = quad.sum;
  *reinterpret_cast<uint2*>(grid.out.at(run.line, run.first_head + head) + dim) = {pack_bf16(share * v.x, share * v.y),
                                                                                   pack_bf16(share * v.z, share * v.w)};
}

// Whether this block is the last of its team's; then it sees what all of them wrote. All threads must call it, after writing.
__device__ bool is_last_to_arrive(unsigned* arrived, int blocks, bool& shared_answer) {
  const unsigned last = static_cast<unsigned>(blocks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) shared_answer = count_round(arrived, last) == last;
  __syncthreads();
  return shared_answer;
}

// Merges the warps' parts of splits [from, to) in order, each split by itself. A line's only run adds them up and at last writes the heads;
// otherwise each split goes to the workspace.
template <int kHeadDim, int kColumns>
__device__ void merge_warps(const SplitGrid& grid, const Run& run, bool alone, int from, int to, const Partials& partials,
                            SplitShared<kHeadDim, kColumns>& shared) {
  for_quads<kHeadDim>(run.heads, [&](int head, int dim, int i) {
    QuadSoftmax total;
    if (alone && from > 0) total = shared.totals[i];
#pragma unroll 1
    for (int split = from; split < to; ++split) {
      const int row = (split - from) * run.heads + head;
      QuadSoftmax quad = {*reinterpret_cast<const float4*>(&shared.sums[0][row][dim]), shared.weights[0][row]};
#pragma unroll
      for (int warp = 1; warp < kSplitWarps; ++warp) {
        quad.add({*reinterpret_cast<const float4*>(&shared.sums[warp][row][dim]), shared.weights[warp][row]});
      }
      if (alone) {
        if (split > 0) total.add(quad);
        if (split == 0) total = quad;
      } else {
        const int64_t at = partials_of(grid, run, head) + split;
        *reinterpret_cast<float4*>(partials.sums + at * kHeadDim + dim) = quad.sum;
        if (dim == 0) partials.weights[at] = quad.weight;
      }
    }
    if (!alone) return;
    if (to < run.end_split) {
      shared.totals[i] = total;
    } else {
      write_quad(grid, run, head, dim, total);
    }
  });
}

// Merges the splits in order. What is read here was written by other blocks, before is_last_to_arrive().
template <int kHeadDim>
__device__ void merge_splits(const SplitGrid& grid, const Run& run, int splits, const Partials& partials) {
  for_quads<kHeadDim>(run.heads, [&](int head, int dim, int) {
    const int64_t begin = partials_of(grid, run, head);
    const Weight* weights = partials.weights + begin;
    const float* sums = partials.sums + begin * kHeadDim + dim;
    QuadSoftmax total;
#pragma unroll 1
    for (int from = 0; from < splits; from += kMergedAtOnce) {
      QuadSoftmax quads[kMergedAtOnce];
#pragma unroll
      for (int j = 0; j < kMergedAtOnce; ++j) {
        const int split = min(from + j, splits - 1);
        quads[j] = {*reinterpret_cast<const float4*>(sums + split * kHeadDim), weights[split]};
      }
      if (from == 0) {
        total = quads[0];
      } else {
        total.add(quads[0]);
      }
#pragma unroll
      for (int j = 1; j < kMergedAtOnce; ++j) {
        if (from + j < splits) total.add(quads[j]);
      }
    }
    write_quad(grid, run, head, dim, total);
  });
}

// The splits of a run one after the other, and what follows when they are done.
template <int kHeadDim, int kColumns, int kTiles>
__device__ void attend_run(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials,
                           SplitWork<kHeadDim, kColumns, kTiles>& work, SplitShared<kHeadDim, kColumns>& shared) {
  const Run& run = work.run;
  const bool alone = work.cut.runs == 1;
  const int warp = work.warp();
  const float scale_log2 = p.scale * kLog2E;
  int from = run.split, row = 0;
#pragma unroll 1
  for (int split = run.split; split < run.end_split; ++split) {
    WarpSoftmax<kHeadDim, kColumns, kTiles> state;
    state.clear();
    work.attend(grid, scale_log2, shared, split, state);
    state.store(&shared.sums[warp][row], &shared.weights[warp][row], run.heads, lane_id());
    row += run.heads;
    const bool is_end = split + 1 == run.end_split;
    if (!is_end && row + run.heads <= kColumns * kColumnQueries) continue;
    __syncthreads();
    merge_warps<kHeadDim>(grid, run, alone, from, split + 1, partials, shared);
    if (is_end) break;
    __syncthreads();
    from = split + 1;
    row = 0;
  }
  if (!alone && is_last_to_arrive(partials.arrived + run.team, work.cut.runs, shared.is_last)) {
    merge_splits<kHeadDim>(grid, run, work.cut.splits, partials);
  }
}

template <int kHeadDim, int kColumns>
__device__ void attend_items(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials) {
  constexpr int kTiles = step_tiles(kHeadDim, kColumns);
  SplitShared<kHeadDim, kColumns>& shared = *reinterpret_cast<SplitShared<kHeadDim, kColumns>*>(dynamic_shared());
  let_next_start();
  const RunSize size = RunSize::of_step(p.decode_meta, grid);
  unsigned team = blockIdx.x, index = 0;
#pragma unroll 1
  while (true) {
    for (; team >= grid.teams; team -= grid.teams) ++index;
    // A block without work stays until the kernels before have ended, too: to the next one this one's end means that all of them have, and
    // where every multiprocessor has a block of this one, each gets one of the next and none gets two.
    if (index >= size.most) return wait_for_earlier();
    SplitWork<kHeadDim, kColumns, kTiles> work;
    const bool has_work = work.take(p, grid, size.tokens, team, static_cast<int>(index), shared);
    wait_for_earlier();
    if (has_work) {
      work.load_vectors(grid);
      wait_copies<0>();
      __syncthreads();
      work.stage(p, grid, shared);
      __syncthreads();
      attend_run(p, grid, partials, work, shared);
    } else {
      wait_copies<0>();  // before the next item's are under way to the same place
      if (index == 0) for_quads<kHeadDim>(work.run.heads, [&](int head, int dim, int) { write_quad(grid, work.run, head, dim, {}); });
    }
    team += gridDim.x;
  }
}

template <int kHeadDim, int kColumns>
__global__ void __launch_bounds__(kSplitThreads, split_blocks(kHeadDim, kColumns))
    split_attention_kernel(const __grid_constant__ FusedAttentionDecodeParams p, const __grid_constant__ SplitGrid grid,
                           const __grid_constant__ Partials partials) {
  attend_items<kHeadDim, kColumns>(p, grid, partials);
}

// How many blocks the runs of a step are to make: two a multiprocessor where the teams alone make about one, else one. While it has one of
// this kernel's, the next kernel's block has room beside it, and those spread evenly.
int64_t busy_blocks(int64_t teams, int64_t multiprocessors) {
  return teams * 4 >= multiprocessors * 3 ? 2 * multiprocessors : multiprocessors;
}

// Splits that the longest past the cache can hold has: no more need blocks.
int64_t splits_in(const FusedAttentionDecodeParams& p) {
  const int64_t needed = ceil_div(SplitCache::capacity_of(p.cache), kSplitUnit), most = most_splits(p.kv_heads);
  return needed < 1 ? 1 : needed < most ? needed : most;
}

Partials partials_in(const FusedAttentionDecodeParams& p) {
  float* sums = p.workspace + workspace_counters(p.workspace_words);
  float* weights = sums + p.lines * p.q_heads * most_splits(p.kv_heads) * p.head_dim;
  return {sums, reinterpret_cast<Weight*>(weights), reinterpret_cast<unsigned*>(p.workspace)};
}

template <int kHeadDim, int kColumns>
int launch_split(const FusedAttentionDecodeParams& p, void* stream) {
  const int64_t group = p.q_heads / p.kv_heads, tiles = ceil_div(group, kColumns * kColumnQueries), teams = p.lines * p.kv_heads * tiles;
  const int64_t count = multiprocessors(), items = teams * splits_in(p), resident = count * split_blocks(kHeadDim, kColumns);
  const SplitGrid grid{static_cast<unsigned>(teams),
                       static_cast<int>(p.lines),
                       static_cast<int>(p.q_heads),
                       static_cast<int>(group),
                       Divisor(p.kv_heads * tiles),
                       Divisor(tiles),
                       Divisor(most_splits(p.kv_heads)),
                       static_cast<float>(p.kv_heads * tiles) / static_cast<float>(busy_blocks(teams, count)),
                       SplitCache(p.cache),
                       {static_cast<const Bf16*>(p.q), p.q_line_stride, p.q_head_stride},
                       {static_cast<const Bf16*>(p.k), p.k_line_stride, p.k_head_stride},
                       {static_cast<const Bf16*>(p.v), p.v_line_stride, p.v_head_stride},
                       {static_cast<Bf16*>(p.out), p.out_line_stride, p.out_head_stride}};
  LaunchShape shape{items < count ? count : items < resident ? items : resident, kSplitThreads};
  shape.shared_bytes = sizeof(SplitShared<kHeadDim, kColumns>);
  shape.early = p.early;
  return launch(split_attention_kernel<kHeadDim, kColumns>, shape, stream, p, grid, partials_in(p));
}

template <int kHeadDim>
int launch_columns(const FusedAttentionDecodeParams& p, void* stream) {
  if constexpr (kHeadDim <= 128) {  // beyond it the registers hold one column
    if (p.q_heads > kColumnQueries * p.kv_heads) return launch_split<kHeadDim, 2>(p, stream);
  }
  return launch_split<kHeadDim, 1>(p, stream);
}

// Indices in the kernel are of 32 bits: vectors of 16 bytes in the cache, positions of a row, partial results, strides.
bool fits_indices(const FusedAttentionDecodeParams& p) {
  const int64_t strides[] = {p.q_line_stride, p.q_head_stride, p.k_line_stride,   p.k_head_stride,
                             p.v_line_stride, p.v_head_stride, p.out_line_stride, p.out_head_stride};
  for (const int64_t stride : strides) {
    if (stride > INT32_MAX) return false;
  }
  return SplitCache::fits(p.cache, p.kv_heads) && p.lines * p.q_heads < INT32_MAX / kMaxSplits;
}

}  // namespace

bool can_split_attention(const FusedAttentionDecodeParams& p) {
  const bool fits_tiles = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  return p.dtype == DType::kBF16 && fits_tiles && p.workspace != nullptr && is_vector_aligned(p.workspace) &&
         is_vector_aligned(p.rope.cos) && is_vector_aligned(p.rope.sin) && is_vector_aligned(p.rope.q_norm) &&
         is_vector_aligned(p.rope.k_norm) && can_use_vectors(p.cache, p.head_dim, p.dtype) && is_vector_aligned(p.out) &&
         are_whole_vectors(p.dtype, p.out_line_stride, p.out_head_stride) && fits_indices(p) && fast_kernels_run();
}

int split_attention(const FusedAttentionDecodeParams& p, void* stream) {
  if (p.lines == 0 || p.q_heads == 0) return 0;
  switch (p.head_dim) {
    case 64:
      return launch_columns<64>(p, stream);
    case 96:
      return launch_columns<96>(p, stream);
    case 128:
      return launch_columns<128>(p, stream);
    default:
      return launch_columns<256>(p, stream);
  }
}

}  // namespace photon::cuda
