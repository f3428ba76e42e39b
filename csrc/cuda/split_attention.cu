// fused_attention_decode for Hopper and later: a line's past is cut into splits that depend on its length alone (common/kv_split.h), each a
// block's work; the last block of a line's splits to finish merges them in order. So one line keeps the whole device busy, and its bits are
// the same whichever step it rides in. After flash-decoding (Dao et al., 2023).
//
// A kernel of a chain: before wait_for_earlier() it reads decode_meta, the page table and old positions of the cache, which is most of what
// it reads at all.
#include "cuda/attend.cuh"
#include "cuda/launch.cuh"
#include "cuda/split_attention.h"
#include "cuda/split_work.cuh"

namespace photon::cuda {
namespace {

constexpr int kQuad = 4;  // floats of one access

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
  float high = -INFINITY, weight = 0.0f;
  float4 sum = {};

  __device__ void add(float other_high, float other_weight, float4 other_sum) {
    const float before = high;
    high = fmaxf(before, other_high);
    const float keep = weight2(before, high), share = weight2(other_high, high);
    weight = fmaf(weight, keep, share * other_weight);
    sum = add_scaled(add_scaled({}, keep, sum), share, other_sum);
  }
};

// body(head of the item, first dim) for each quad of an item's results, one a thread at a time.
template <typename Body>
__device__ void for_quads(int heads, int head_dim, const Body& body) {
  const int quads = head_dim / kQuad;
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * quads; i += kSplitThreads) body(i / quads, i % quads * kQuad);
}

__device__ void write_quad(const FusedAttentionDecodeParams& p, const SplitItem& item, int head, int dim, const QuadSoftmax& quad) {
  Bf16* out = static_cast<Bf16*>(p.out) + item.line * p.out_line_stride + (item.first_head + head) * p.out_head_stride + dim;
  const float4 v = add_scaled({}, quad.weight == 0.0f ? 0.0f : 1.0f / quad.weight, quad.sum);
  *reinterpret_cast<uint2*>(out) = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
}

// Merges the warps in order: to the result, where the line has this split alone, or else to this split's part of it.
template <int kHeadDim, typename Shared>
__device__ void merge_warps(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const SplitItem& item, bool is_only,
                            const Partials& partials, const Shared& shared) {
  for_quads(item.heads, kHeadDim, [&](int h, int d) {
    QuadSoftmax quad;
#pragma unroll
    for (int w = 0; w < kSplitWarps; ++w) {
      quad.add(shared.highs[w][h], shared.weights[w][h], *reinterpret_cast<const float4*>(&shared.sums[w][h][d]));
    }
    if (is_only) return write_quad(p, item, h, d, quad);
    const int64_t at = (item.line * p.q_heads + item.first_head + h) * grid.splits + item.split;
    *reinterpret_cast<float4*>(partials.sums + at * kHeadDim + d) = quad.sum;
    if (d == 0) partials.weights[at] = {quad.high, quad.weight};
  });
}

// Whether this block is the last of its team's; then it sees what all of them wrote. All threads must call it, after writing.
__device__ bool is_last_to_arrive(unsigned* arrived, int blocks, bool& shared_answer) {
  const unsigned last = static_cast<unsigned>(blocks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared_answer = atomicInc(arrived, last) == last;
    __threadfence();
  }
  __syncthreads();
  return shared_answer;
}

// Merges the splits in order. What is read here was written by other blocks, before is_last_to_arrive().
template <int kHeadDim>
__device__ void merge_splits(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const SplitItem& item, int splits,
                             const Partials& partials) {
  constexpr int kAhead = 8;  // splits in flight
  for_quads(item.heads, kHeadDim, [&](int h, int d) {
    const int64_t at = (item.line * p.q_heads + item.first_head + h) * grid.splits;
    QuadSoftmax quad;
    for (int from = 0; from < splits; from += kAhead) {
      float4 sums[kAhead];
      float2 weights[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool there = from + i < splits;
        weights[i] = there ? partials.weights[at + from + i] : float2{-INFINITY, 0.0f};
        sums[i] = there ? *reinterpret_cast<const float4*>(partials.sums + (at + from + i) * kHeadDim + d) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) quad.add(weights[i].x, weights[i].y, sums[i]);
    }
    write_quad(p, item, h, d, quad);
  });
}

// From the warps' sums in shared memory to the output, if not of this block then of the last one of its team.
template <int kHeadDim, typename Shared>
__device__ void merge(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials, Shared& shared) {
  __syncthreads();
  const auto [item, splits] = shared.result;
  merge_warps<kHeadDim>(p, grid, item, splits == 1, partials, shared);
  if (splits > 1 && is_last_to_arrive(partials.arrived + item.team, splits, shared.is_last)) {
    merge_splits<kHeadDim>(p, grid, item, splits, partials);
  }
}

template <int kHeadDim, int kColumns>
__device__ void attend_items(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const Partials& partials) {
  __shared__ SplitShared<kHeadDim, kColumns> shared;
  let_next_start();
  SplitWork<kHeadDim, kColumns> work;
  unsigned index = blockIdx.x;
  const auto take_next = [&] {
#pragma unroll 1
    for (; index < grid.items; index += gridDim.x) {
      if (work.take(p, grid, index)) return true;
    }
    return false;
  };
  bool more = take_next();
  if (!more) return;
  work.stage_norms(p, shared);
  wait_for_earlier();
  work.load_vectors(p);
  __syncthreads();
#pragma unroll 1
  while (more) {
    const bool attends = work.alive;
    if (attends) {
      work.stage(p, shared);
      __syncthreads();
      if (threadIdx.x == 0) shared.result = {work.item, work.splits(grid)};  // there rather than in registers, which are full
      WarpSoftmax<kHeadDim, kColumns> state;
      state.clear();
      work.attend(p, shared, state);
      const int warp = work.warp();
      state.store(shared.sums[warp], shared.highs[warp], shared.weights[warp], lane_id());
    } else {
      for_quads(work.item.heads, kHeadDim, [&](int h, int d) { write_quad(p, work.item, h, d, {}); });
    }
    // The next item's loads are under way while this one is merged.
    index += gridDim.x;
    more = take_next();
    if (more) work.load_vectors(p);
    if (attends) merge<kHeadDim>(p, grid, partials, shared);
  }
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
  const int64_t items = teams * splits_in(p), resident = static_cast<int64_t>(multiprocessors()) * split_blocks(kHeadDim, kColumns);
  const SplitGrid grid{static_cast<unsigned>(items), static_cast<unsigned>(teams), static_cast<unsigned>(tiles), most_splits(p.kv_heads)};
  LaunchShape shape{items < resident ? items : resident, kSplitThreads};
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
