// Attention of chunks of tokens over their paged context. A CTA takes one KV head and a tile of
// consecutive tokens; the query heads of these tokens that share the KV head are the rows of its
// tile. It goes through the context of the tokens' table row in tiles of keys, and copies the next
// tile of keys while it computes with the present one. A long context is cut into parts, one for
// each CTA of a cluster, unless the token's chunk has tiles enough to keep the device busy.
//
// Segments only say where tiles start, and how many tokens a chunk has. Which tokens share a pass
// over a context is read from decode_meta. So every token is computed as its own row and length
// say, whatever the segments hold; and where a tile has tokens of several rows, the CTA makes one
// pass for each of these rows.
#include "cuda/chunk_attention.h"

#include <algorithm>

#include "common/segment.h"
#include "cuda/chunk_copies.cuh"
#include "cuda/chunk_merge.cuh"
#include "cuda/chunk_tile.cuh"

namespace photon::cuda {
namespace {

// What a launch has besides the op's own parameters.
struct ChunkGrid {
  int tiles, cluster;  // cluster: CTAs of a cluster
  int whole_tokens;    // a chunk of so many tokens or more has its contexts whole
};

// A segment's first token and its number of tokens, packed into one number, so that a maximum finds
// the segment that starts last, and of two that start at the same token the longer one. A bucket's
// unused segments are empty, and so never win.
struct Chunk {
  long long number;

  __device__ Chunk(int first, int tokens) : number(static_cast<long long>(first) << 32 | tokens) {}
  __device__ explicit Chunk(long long number) : number(number) {}
  __device__ int first() const { return static_cast<int>(number >> 32); }
  __device__ int tokens() const { return static_cast<int>(number); }
};

// Segment number `index` of a step of `tokens` tokens. Behind the last segment it is an empty one
// that starts where the step ends.
__device__ Chunk load_chunk(const PagedAttentionParams& p, int64_t index, int tokens) {
  if (index >= p.num_segments) return Chunk(tokens, 0);
  const Segment segment = load_segment(p.segments, index);
  const int first = min(max(segment.first_token, 0), tokens);
  return Chunk(first, min(max(segment.num_tokens, 0), tokens - first));
}

// Finds tile number `wanted` of the step, and writes task.first_token and task.tokens. Tiles have
// at most `tile_tokens` tokens. The first starts at token 0, and a new one starts at each segment's
// first token, unless an earlier segment starts behind it. Tokens that no segment has belong to the
// segment before them. A kernel that cuts contexts leaves out the tiles whose contexts stay whole,
// by giving them no tokens, and the other kernel leaves out the rest. One warp must call it; it
// reads 32 segments at a time.
__device__ void find_tile(const PagedAttentionParams& p, const ChunkGrid& grid, int wanted,
                          int tile_tokens, bool cuts, ChunkTask& task) {
  const int lane = threadIdx.x % kWarpSize, tokens = static_cast<int>(p.tokens);
  Chunk last(0, 0);
  int tiles = 0;
  // Turn i has the tokens before segment i. There is one turn more than segments, for the tokens
  // from the last segment on.
  for (int64_t base = 0; base <= p.num_segments; base += kWarpSize) {
    Chunk next = load_chunk(p, base + lane, tokens);
    next.number = max(next.number, last.number);
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const long long before = __shfl_up_sync(kFullWarp, next.number, offset);
      if (lane >= offset) next.number = max(next.number, before);
    }
    Chunk chunk(__shfl_up_sync(kFullWarp, next.number, 1));
    if (lane == 0) chunk = last;
    const int begin = chunk.first(), end = next.first(),
              own = (end - begin + tile_tokens - 1) / tile_tokens;
    int upto = own;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int before = __shfl_up_sync(kFullWarp, upto, offset);
      if (lane >= offset) upto += before;
    }
    upto += tiles;
    if (wanted < upto && wanted >= upto - own) {
      const int start = begin + (wanted - upto + own) * tile_tokens,
                stop = min(start + tile_tokens, end);
      task.first_token = p.counts != nullptr ? max(start, p.counts[kCountDecodeTokens]) : start;
      task.tokens = (chunk.tokens() < grid.whole_tokens) == cuts ? stop - task.first_token : 0;
    }
    last.number = __shfl_sync(kFullWarp, next.number, kWarpSize - 1);
    tiles = __shfl_sync(kFullWarp, upto, kWarpSize - 1);
    if (wanted < tiles) return;
  }
}

// Clusters take the tiles from the step's last token to its first, so that the longest contexts of
// a chunk start first, and the CTAs that end last have short ones.
template <typename Plan>
__device__ void find_task(const PagedAttentionParams& p, const ChunkGrid& grid, ChunkTask& task) {
  const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.q_heads) / kv_heads;
  const int block = static_cast<int>(blockIdx.x), split_group = block / grid.cluster;
  if (threadIdx.x == 0)
    task = {0, 0, split_group % kv_heads, group, block % grid.cluster, grid.cluster};
  __syncwarp();
  find_tile(p, grid, grid.tiles - 1 - split_group / kv_heads, Plan::kRows / group, Plan::kCuts,
            task);
}

template <typename Plan>
__device__ void load_tokens(const PagedAttentionParams& p, ChunkShared<Plan>& shared) {
  for (int i = threadIdx.x; i < shared.task.tokens; i += Plan::kThreads) {
    const Token token = load_token(p.decode_meta, shared.task.first_token + i);
    const int32_t length = kv_len(p.cache, token);
    shared.rows[i] = length > 0 ? token.row : -1;
    shared.lengths[i] = length;
  }
}

__device__ int32_t warp_min(int32_t v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v = min(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

__device__ int32_t warp_max(int32_t v) { return -warp_min(-v); }

// Finds the run that begins at token `first` of the tile. All lanes of a warp must call it, and all
// get the run.
template <typename Plan>
__device__ Run find_run(const ChunkShared<Plan>& shared, int first) {
  const int32_t row = shared.rows[first];
  const ChunkTask task = shared.task;
  int32_t end = task.tokens, least = INT_MAX, most = 0;
  Span part = {INT_MAX, 0};
  for (int i = first + threadIdx.x % kWarpSize; i < task.tokens; i += kWarpSize) {
    if (shared.rows[i] != row) end = min(end, i);
  }
  end = warp_min(end);
  for (int i = first + threadIdx.x % kWarpSize; i < end; i += kWarpSize) {
    const int32_t length = shared.lengths[i];
    const Span own = shared.part(length);
    least = min(least, length);
    most = max(most, length);
    if (own.is_empty()) continue;
    part = {min(part.first, own.first), max(part.end, own.end)};
  }
  most = warp_max(most);
  return {first,
          end,
          row,
          warp_min(least),
          most,
          shared.parts(most),
          {warp_min(part.first), warp_max(part.end)}};
}

// Makes shared.run the run that begins at token `first`, and clears what was noted for the run
// before. All threads must call it.
template <typename Plan>
__device__ void start_run(ChunkShared<Plan>& shared, int first) {
  __syncthreads();  // no thread reads the run before any more
  if (threadIdx.x < kWarpSize) {
    const Run run = find_run(shared, first);
    if (threadIdx.x == 0) shared.run = run;
  }
  for (int d = threadIdx.x; d < Plan::kHeadDim; d += Plan::kThreads) shared.poisoned[d] = INT_MAX;
  __syncthreads();
}

// Of the run's rows that this warp has: the positions that are in the parts of all of them, and
// where the last of these parts ends. `end` 0: the warp has no row of the run.
struct WarpParts {
  Span all;
  int32_t end;
};

// Writes shared.own_parts of the warp's rows.
template <typename Plan>
__device__ WarpParts find_parts(ChunkShared<Plan>& shared) {
  const int row =
      threadIdx.x / kWarpSize * Plan::kWarpRows + threadIdx.x % kWarpSize % Plan::kWarpRows;
  const int token = row / shared.task.group;
  const bool is_in_run = shared.run.has(token);
  const Span part = is_in_run ? shared.part(shared.lengths[token]) : Span{0, 0};
  if (threadIdx.x % kWarpSize < Plan::kWarpRows) shared.own_parts[row] = part;
  __syncwarp();
  return {{warp_max(part.first), warp_min(is_in_run ? part.end : INT_MAX)}, warp_max(part.end)};
}

// Makes a row's sums NaN where it attends to a value that hide_values() has hidden. Called after
// the part's last tile, when all warps have noted what they hid.
template <typename Plan>
__device__ void spoil_sums(const ChunkShared<Plan>& shared, RowSoftmax<Plan>& state) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t end = shared.own_parts[lane_row<Plan>(f) + half * 8].end;
#pragma unroll
      for (int n = 0; n < Plan::kColumns; ++n) {
        if (shared.poisoned[n * 8 + pair] < end) state.sum[f][n][2 * half] = NAN;
        if (shared.poisoned[n * 8 + pair + 1] < end) state.sum[f][n][2 * half + 1] = NAN;
      }
    }
  }
}

// Goes through the CTA's part of the run's context. All threads must call it.
template <typename Plan>
__device__ void scan_run(const PagedAttentionParams& p, ChunkShared<Plan>& shared,
                         RowSoftmax<Plan>& state) {
  const float scale = p.scale * kLog2E;  // weights are powers of two
  const int32_t begin = Plan::kCuts ? shared.run.part.first : 0;
  KvPlace place = look_up<Plan>(p.cache, shared.run, begin);
  copy_queries(p, shared);
  copy_keys<Plan>(p.cache, shared.task.kv_head, place, shared.keys(0), shared.values(0));
  commit_copies();
  place = look_up<Plan>(p.cache, shared.run, begin + kTileKeys);
  const WarpParts own = find_parts(shared);
  for (int32_t first = begin, stage = 0; first < shared.run.part.end;
       first += kTileKeys, stage ^= 1) {
    const int32_t end = first + kTileKeys;
    wait_copies<0>();
    if (end > shared.run.least) hide_values<Plan>(shared.values(stage), first, shared.poisoned);
    __syncthreads();  // all warps' copies have arrived, and no warp reads the other stage any more
    if (end < shared.run.part.end) {
      copy_keys<Plan>(p.cache, shared.task.kv_head, place, shared.keys(stage ^ 1),
                      shared.values(stage ^ 1));
      commit_copies();
      place = look_up<Plan>(p.cache, shared.run, end + kTileKeys);
    }
    if (first >= own.end) continue;
    Scores<Plan> scores;
    Weights<Plan> weights;
    multiply_keys<Plan>(scores, shared.q, shared.keys(stage));
    if ((Plan::kCuts && first < own.all.first) || end > own.all.end)
      hide_scores<Plan>(scores, shared.own_parts, first);
    weigh_scores<Plan>(weights, scores, state, scale);
    multiply_values<Plan>(state, weights, shared.values(stage));
  }
  spoil_sums(shared, state);
}

// Turns the sums of the run's rows into outputs, and writes them over the rows' queries in shared
// memory.
template <typename Plan>
__device__ void finish_rows(ChunkShared<Plan>& shared, const RowSoftmax<Plan>& state) {
  const int pair = threadIdx.x % 4 * 2;
  __syncwarp();  // all lanes have read the queries
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = total_of(state, f, half);
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const int row = lane_row<Plan>(f) + half * 8;
      if (shared.own_parts[row].is_empty()) continue;
#pragma unroll
      for (int n = 0; n < Plan::kColumns; ++n) {
        // 0 is added so that a zero has the same sign whichever tiles it went through.
        const float left = fmaf(state.sum[f][n][2 * half], inverse, 0.0f),
                    right = fmaf(state.sum[f][n][2 * half + 1], inverse, 0.0f);
        *reinterpret_cast<uint32_t*>(shared.q + Plan::place(row, n) + pair) =
            pack_bf16(left, right);
      }
    }
  }
  __syncwarp();
}

// Writes the warp's rows of the run to `out`; zeros where the run is dead.
template <typename Plan>
__device__ void store_rows(const PagedAttentionParams& p, const ChunkShared<Plan>& shared) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * Plan::kWarpRows,
            vector = lane % Plan::kVectors;
  const ChunkTask task = shared.task;
  const Run run = shared.run;
  if (lane >= Plan::kStepRows * Plan::kVectors) return;
  for (int row = first_row + lane / Plan::kVectors; row < first_row + Plan::kWarpRows;
       row += Plan::kStepRows) {
    if (!run.has(row / task.group)) continue;
    Bf16* out = static_cast<Bf16*>(p.out) + task.offset(row, p.out_stride, p.out_head_stride) +
                vector * kVector;
    *reinterpret_cast<uint4*>(out) =
        run.most > 0 ? *reinterpret_cast<const uint4*>(shared.q + Plan::place(row, vector))
                     : uint4{};
  }
}

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    chunk_attention_kernel(const PagedAttentionParams p, const ChunkGrid grid) {
  auto& shared = *reinterpret_cast<ChunkShared<Plan>*>(dynamic_shared());
  if (threadIdx.x < kWarpSize) find_task<Plan>(p, grid, shared.task);
  __syncthreads();
  if (shared.task.tokens <= 0) return;
  load_tokens(p, shared);
  for (int first = 0; first < shared.task.tokens; first = shared.run.end) {
    start_run(shared, first);
    RowSoftmax<Plan> state;
    state.clear();
    if (!shared.run.part.is_empty()) scan_run(p, shared, state);
    if (Plan::kCuts && shared.run.parts > 1) {
      reduce_parts(p, shared, state);
    } else if (shared.task.rank == 0) {
      if (shared.run.most > 0) finish_rows(shared, state);
      store_rows(p, shared);
    }
  }
}

template <typename Plan>
bool has_room() {
  return sizeof(ChunkShared<Plan>) <=
         static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// The most tiles that a step may have. Each segment may need one more than its tokens fill, because
// tokens of two segments share no tile.
template <typename Plan>
int64_t count_tiles(const PagedAttentionParams& p) {
  return ceil_div(p.tokens, Plan::kRows / (p.q_heads / p.kv_heads)) + p.num_segments;
}

// From so many tokens on, a chunk's contexts stay whole.
int64_t whole_tokens(const PagedAttentionParams& p) {
  return ceil_div(int64_t{kWholeRows} * sms(), p.q_heads);
}

// CTAs of a cluster: one for each part that a context may have in these tables. Only the device
// knows how long contexts and segments are, except that a step's only segment has all its tokens.
int cluster_blocks(const PagedAttentionParams& p) {
  const bool is_whole = p.num_segments == 1 && p.tokens >= whole_tokens(p);
  return hopper_runs() && !is_whole ? parts_of(row_capacity(p.cache)) : 1;
}

template <typename Plan>
int launch_kernel(const PagedAttentionParams& p, const ChunkGrid& grid, void* stream) {
  const int64_t blocks = grid.tiles * p.kv_heads * grid.cluster;
  const LaunchShape shape{blocks, Plan::kThreads, sizeof(ChunkShared<Plan>),
                          static_cast<unsigned>(grid.cluster)};
  return launch(chunk_attention_kernel<Plan>, shape, stream, p, grid);
}

// Whole and cut contexts are the work of two kernels. In one kernel, the CTAs of a cluster that
// have nothing to do for a whole context would take the places of CTAs that have.
template <typename Plan>
int launch_plan(const PagedAttentionParams& p, void* stream) {
  const int64_t tiles = count_tiles<Plan>(p), whole = whole_tokens(p);
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const int cluster = cluster_blocks(p), count = static_cast<int>(tiles);
  if (cluster == 1) return launch_kernel<typename Plan::Whole>(p, {count, 1, 0}, stream);
  if (p.tokens >= whole) {
    if (const int error =
            launch_kernel<typename Plan::Whole>(p, {count, 1, static_cast<int>(whole)}, stream))
      return error;
  }
  return launch_kernel<Plan>(
      p, {count, cluster, static_cast<int>(std::min<int64_t>(whole, INT_MAX))}, stream);
}

// Chooses the size of tiles. Large ones read keys and values less often; small ones keep all SMs
// busy where the step has few tokens. The results are the same, to the bit.
template <typename Large, typename Small>
int launch_chunks(const PagedAttentionParams& p, void* stream) {
  const int64_t large_blocks = ceil_div(p.tokens * p.q_heads, Large::kRows) * cluster_blocks(p);
  if (has_room<Large>() && large_blocks >= sms()) return launch_plan<Large>(p, stream);
  return launch_plan<Small>(p, stream);
}

// Calls `body` with the large and the small plan of a head_dim. Returns `otherwise` where that has
// no plans.
template <typename Result, typename Body>
Result with_plans(int64_t head_dim, Result otherwise, const Body& body) {
  switch (head_dim) {
    case 64:
      return body(TypeTag<ChunkPlan<64, 4, 2>>{}, TypeTag<ChunkPlan<64, 4, 1>>{});
    case 96:
      return body(TypeTag<ChunkPlan<96, 4, 2>>{}, TypeTag<ChunkPlan<96, 4, 1>>{});
    case 128:
      return body(TypeTag<ChunkPlan<128, 4, 2>>{}, TypeTag<ChunkPlan<128, 4, 1>>{});
    case 256:
      return body(TypeTag<ChunkPlan<256, 8, 1>>{}, TypeTag<ChunkPlan<256, 4, 1>>{});
    default:
      return otherwise;
  }
}

}  // namespace

const char* chunk_attention_misfit(const PagedAttentionParams& p) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 8)
    return "the device's compute capability is below 8.0";
  if (p.dtype != DType::kBF16) return "the dtype is not bfloat16";
  const KvCache& c = p.cache;
  const bool aligned =
      is_vector_aligned(p.out) && is_vector_aligned(p.q) && is_vector_aligned(c.k) &&
      is_vector_aligned(c.v) &&
      are_whole_vectors(p.dtype, p.q_stride, p.q_head_stride, p.out_stride, p.out_head_stride,
                        c.k_page_stride, c.k_token_stride, c.k_head_stride, c.v_page_stride,
                        c.v_token_stride, c.v_head_stride);
  if (!aligned) return "a pointer or a stride is no multiple of 16 bytes";
  const bool is_small =
      p.tokens <= INT_MAX / 2 &&
      c.pages_per_row * c.page_size <= INT_MAX / 2;  // the kernel counts both by int
  if (!is_small) return "sizes are beyond what 32 bits index";
  if (!(p.scale > 0.0f)) return "scale is not above 0";
  if (c.num_pages == 0) return "the cache has no pages";
  const char* const no_plan = "head_dim is none of 64, 96, 128 and 256";
  return with_plans(p.head_dim, no_plan, [&](auto, auto small) -> const char* {
    using Small = typename decltype(small)::type;
    if (p.q_heads > Small::kRows * p.kv_heads) return "a KV head has more than 64 query heads";
    return has_room<Small>() ? nullptr : "the device has too little shared memory";
  });
}

int chunk_attention(const PagedAttentionParams& p, void* stream) {
  if (p.tokens == 0 || p.q_heads == 0) return 0;
  return with_plans(
      p.head_dim, static_cast<int>(cudaErrorInvalidValue), [&](auto large, auto small) {
        return launch_chunks<typename decltype(large)::type, typename decltype(small)::type>(
            p, stream);
      });
}

}  // namespace photon::cuda
