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
constexpr int kBusyBlocks = 2;    // of a multiprocessor, which the runs of a step are to make
constexpr int kMergedAtOnce = 8;  // splits in flight

// Blocks of a multiprocessor: as many as have registers. At head_dim 128 that is 12 warps, each with a tile of 8 KB on its way.
constexpr int split_blocks(int head_dim, int columns) { return (head_dim <= 64 ? 4 : head_dim <= 128 ? 3 : 2) - (columns - 1); }

// What a split leaves for the merge: of each query head the sums, which are of exp2(score - high) * v, and (high, weight).
struct Partials {
  float* sums;        // [lines * q_heads, splits, head_dim]
  float2* weights;    // [lines * q_heads, splits]
  unsigned* arrived;  // [teams]; zero between calls
};

__device__ float4 add_scaled(float4 sum, float share, float4 v) {
  return {fmaf(share, v.x, sum.x), fmaf(share, v.y, sum.y), fmaf(share, v.z, sum.z), fmaf(share, v.w, sum.w)};
}

// Four neighbouring values of a head, and what they weigh.
struct QuadSoftmax {
  float4 sum = {};
  float2 weight = {-INFINITY, 0.0f};  // the highest score, and the sum of exp2(score - high)

  __device__ void add(float2 other, float4 other_sum) {
    const float before = weight.x;
    weight.x = fmaxf(before, other.x);
    const float keep = weight2(before, weight.x), share = weight2(other.x, weight.x);
    weight.y = fmaf(weight.y, keep, share * other.y);
    sum = add_scaled(add_scaled({}, keep, sum), share, other_sum);
  }
};

// body(head of the run, first dim, its number) for each quad of a run's results, one a thread at a time, and always the same thread.
template <int kHeadDim, typename Body>
__device__ void for_quads(int heads, const Body& body) {
  constexpr int kQuads = kHeadDim / kQuad;
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * kQuads; i += kSplitThreads) body(i / kQuads, i % kQuads * kQuad, i);
}

__device__ void write_quad(const FusedAttentionDecodeParams& p, const Run& run, int head, int dim, const QuadSoftmax& quad) {
  Bf16* out = static_cast<Bf16*>(p.out) + run.line * p.out_line_stride + (run.first_head + head) * p.out_head_stride + dim;
  const float4 v = add_scaled({}, quad.weight.y == 0.0f ? 0.0f : 1.0f / quad.weight.y, quad.sum);
  *reinterpret_cast<uint2*>(out) = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
}

// Where the partial results of a head of the run begin, in splits.
__device__ int64_t partials_of(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Run& run, int head) {
  return (run.line * p.q_heads + run.first_head + head) * grid.splits;
}

// Merges the warps in order. A line's only run keeps the sum of its splits so far; otherwise each split goes to the workspace.
template <int kHeadDim, typename Shared>
__device__ void merge_warps(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Run& run, int split, const Partials& partials,
                            Shared& shared) {
  for_quads<kHeadDim>(run.heads, [&](int h, int d, int i) {
    QuadSoftmax quad;
#pragma unroll
    for (int w = 0; w < kSplitWarps; ++w) {
      quad.add({shared.highs[w][h], shared.weights[w][h]}, *reinterpret_cast<const float4*>(&shared.sums[w][h][d]));
    }
    if (run.runs == 1) {
      QuadSoftmax sum;
      if (split > 0) sum = {shared.run_sums[i], shared.run_weights[i]};
      sum.add(quad.weight, quad.sum);
      shared.run_sums[i] = sum.sum;
      shared.run_weights[i] = sum.weight;
      return;
    }
    const int64_t at = partials_of(p, grid, run, h) + split;
    *reinterpret_cast<float4*>(partials.sums + at * kHeadDim + d) = quad.sum;
    if (d == 0) partials.weights[at] = quad.weight;
  });
}

// Whether this block is the last of its team's; then it sees what all of them wrote. All threads must call it, after writing.
__device__ bool is_last_to_arrive(unsigned* arrived, int blocks, bool& shared_answer) {
  const unsigned last = static_cast<unsigned>(blocks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) shared_answer = count_round(arrived, last) == last;
  __syncthreads();
  return shared_answer;
}

// Merges the splits in order. What is read here was written by other blocks, before is_last_to_arrive().
template <int kHeadDim>
__device__ void merge_splits(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Run& run, int splits,
                             const Partials& partials) {
  for_quads<kHeadDim>(run.heads, [&](int h, int d, int) {
    const int64_t at = partials_of(p, grid, run, h);
    QuadSoftmax quad;
#pragma unroll 1
    for (int from = 0; from < splits; from += kMergedAtOnce) {
      float4 sums[kMergedAtOnce];
      float2 weights[kMergedAtOnce];
#pragma unroll
      for (int i = 0; i < kMergedAtOnce; ++i) {
        const bool there = from + i < splits;
        weights[i] = there ? partials.weights[at + from + i] : float2{-INFINITY, 0.0f};
        sums[i] = there ? *reinterpret_cast<const float4*>(partials.sums + (at + from + i) * kHeadDim + d) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kMergedAtOnce; ++i) quad.add(weights[i], sums[i]);
    }
    write_quad(p, run, h, d, quad);
  });
}

// The splits of a run one after the other, and what follows when they are done.
template <int kHeadDim, int kColumns>
__device__ void attend_run(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials,
                           SplitWork<kHeadDim, kColumns>& work, SplitShared<kHeadDim, kColumns>& shared) {
  const Run& run = work.run;
#pragma unroll 1
  for (int split = run.split; split < run.end_split; ++split) {
    WarpSoftmax<kHeadDim, kColumns> state;
    state.clear();
    work.attend(p, shared, split, state);
    if (split > run.split) __syncthreads();  // the sums of the split before have been read
    const int warp = work.warp();
    state.store(shared.sums[warp], shared.highs[warp], shared.weights[warp], lane_id());
    __syncthreads();
    merge_warps<kHeadDim>(p, grid, run, split, partials, shared);
  }
  if (run.runs == 1) {
    for_quads<kHeadDim>(run.heads, [&](int h, int d, int i) { write_quad(p, run, h, d, {shared.run_sums[i], shared.run_weights[i]}); });
  } else if (is_last_to_arrive(partials.arrived + run.team, run.runs, shared.is_last)) {
    merge_splits<kHeadDim>(p, grid, run, RunSize::splits_of(work.length, grid), partials);
  }
}

template <int kHeadDim, int kColumns>
__device__ void attend_items(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials) {
  __shared__ SplitShared<kHeadDim, kColumns> shared;
  let_next_start();
  SplitWork<kHeadDim, kColumns> work;
  const RunSize size = RunSize::of_step(p, grid);
  bool has_waited = false;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < grid.teams * size.most; item += gridDim.x) {
    const bool has_work = work.take(p, grid, size, item);
    if (!has_waited) {
      work.stage_norms(p, shared);
      wait_for_earlier();
      has_waited = true;
    }
    if (!has_work) continue;
    if (!work.alive) {
      for_quads<kHeadDim>(work.run.heads, [&](int h, int d, int) { write_quad(p, work.run, h, d, {}); });
      continue;
    }
    work.load_vectors(p);
    __syncthreads();  // the norms are there; what the item before left in shared memory has been read
    work.stage(p, shared);
    __syncthreads();
    attend_run(p, grid, partials, work, shared);
  }
  // A block without work stays until the kernels before have ended, too: to the next one this one's end means that all of them have, and
  // where every multiprocessor has a block of this one, each gets one of the next and none gets two.
  if (!has_waited) wait_for_earlier();
}

template <int kHeadDim, int kColumns>
__global__ void __launch_bounds__(kSplitThreads, split_blocks(kHeadDim, kColumns))
    split_attention_kernel(const __grid_constant__ FusedAttentionDecodeParams p, const SplitGrid grid, const Partials partials) {
  attend_items<kHeadDim, kColumns>(p, grid, partials);
}

int64_t capacity_of(const KvCache& c) { return c.page_table != nullptr ? c.pages_per_row * c.page_size : c.page_size; }

// Splits that the longest past the cache can hold has: no more need blocks.
int64_t splits_in(const FusedAttentionDecodeParams& p) {
  const int64_t needed = ceil_div(capacity_of(p.cache), kSplitUnit), most = most_splits(p.kv_heads);
  return needed < 1 ? 1 : needed < most ? needed : most;
}

Partials partials_in(const FusedAttentionDecodeParams& p) {
  float* sums = p.workspace + workspace_counters(p.workspace_words);
  float* weights = sums + p.lines * p.q_heads * most_splits(p.kv_heads) * p.head_dim;
  return {sums, reinterpret_cast<float2*>(weights), reinterpret_cast<unsigned*>(p.workspace)};
}

template <int kHeadDim, int kColumns>
int launch_split(const FusedAttentionDecodeParams& p, void* stream) {
  const int64_t tiles = ceil_div(p.q_heads / p.kv_heads, kColumns * kColumnQueries), teams = p.lines * p.kv_heads * tiles;
  const int64_t count = multiprocessors(), items = teams * splits_in(p), resident = count * split_blocks(kHeadDim, kColumns);
  const SplitGrid grid{static_cast<unsigned>(teams), static_cast<unsigned>(tiles), most_splits(p.kv_heads),
                       static_cast<int>(count) * kBusyBlocks};
  LaunchShape shape{items < count ? count : items < resident ? items : resident, kSplitThreads};
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

// Indices in the kernel are of 32 bits: vectors of 16 bytes in the cache, positions of a row, items of work.
bool fits_indices(const FusedAttentionDecodeParams& p) {
  const KvCache& c = p.cache;
  const int64_t k_end = c.num_pages * c.k_page_stride + c.page_size * c.k_token_stride + p.kv_heads * c.k_head_stride;
  const int64_t v_end = c.num_pages * c.v_page_stride + c.page_size * c.v_token_stride + p.kv_heads * c.v_head_stride;
  return k_end / kPack < kAbsent && v_end / kPack < kAbsent && capacity_of(c) < INT32_MAX / 2 &&
         p.lines * p.q_heads < INT32_MAX / kMaxSplits;
}

}  // namespace

bool can_split_attention(const FusedAttentionDecodeParams& p) {
  const bool fits_tiles = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  return p.dtype == DType::kBF16 && fits_tiles && p.workspace != nullptr && is_vector_aligned(p.workspace) &&
         can_use_vectors(p.cache, p.head_dim, p.dtype) && is_vector_aligned(p.out) &&
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
