// Attention of chunks of tokens over their paged context. A CTA takes one KV head and a tile of
// consecutive tokens; the query heads of these tokens that share the KV head are the rows of its
// tile. It goes through the context of the tokens' table row in tiles of keys, and copies the next
// tile of keys while it computes with the present one. A long context is cut into parts, one for
// each CTA of a cluster.
//
// Short and long contexts are the work of two kernels, one after the other: a CTA of the first has
// a tile to itself, a cluster of the second shares one. In one kernel, the CTAs of a cluster that
// have nothing to do for a short context would take the places of CTAs that have. A tile that has
// tokens of both kinds is done by both, each for its own tokens.
//
// Segments only say where tiles start. Which tokens share a pass over a context is read from
// decode_meta. So every token is computed as its own row and length say, whatever the segments
// hold; and where a tile has tokens of several rows, the CTA makes one pass for each of these rows.
#pragma once
#include <algorithm>

#include "common/attention_plan.h"
#include "common/segment.h"
#include "cuda/attention/chunk_copies.cuh"
#include "cuda/attention/chunk_merge.cuh"
#include "cuda/attention/chunk_tile.cuh"

namespace photon::cuda {

// What a launch has besides the op's own parameters.
struct ChunkGrid {
  int tiles;
  int32_t whole_keys;  // the kernel without cuts takes contexts of up to this many positions;
                       // the kernel that cuts takes longer ones
};

// The first token of segment number `index` of a step of `tokens` tokens. Behind the last segment
// it is where the step ends.
__device__ inline int load_first_token(const PagedAttentionParams& p, int64_t index, int tokens) {
  if (index >= p.num_segments) return tokens;
  return min(max(load_segment(p.segments, index).first_token, 0), tokens);
}

// The first of a step's tokens that is not a decode token.
__device__ inline int first_chunk_token(const PagedAttentionParams& p) {
  return p.counts != nullptr ? p.counts[kCountDecodeTokens] : 0;
}

// Finds tile number `wanted` of the step, and writes task.first_token and task.tokens. Tiles have
// at most `tile_tokens` tokens. The first starts at token 0, and a new one starts at each segment's
// first token, unless an earlier segment starts behind it. Tokens that no segment has belong to the
// segment before them. One warp must call it; it reads 32 segments at a time.
__device__ inline void find_tile(const PagedAttentionParams& p, int wanted, int tile_tokens,
                                 ChunkTask& task) {
  const int lane = threadIdx.x % kWarpSize, tokens = static_cast<int>(p.tokens);
  int last = 0, tiles = 0;
  // Turn i has the tokens before segment i. There is one turn more than segments, for the tokens
  // from the last segment on.
  for (int64_t base = 0; base <= p.num_segments; base += kWarpSize) {
    int end = max(load_first_token(p, base + lane, tokens), last);
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end, offset);
      if (lane >= offset) end = max(end, before);
    }
    int begin = __shfl_up_sync(kFullWarp, end, 1);
    if (lane == 0) begin = last;
    const int own = (end - begin + tile_tokens - 1) / tile_tokens;
    const int upto = tiles + warp_sum_upto(own);
    if (wanted < upto && wanted >= upto - own) {
      const int start = begin + (wanted - upto + own) * tile_tokens,
                stop = min(start + tile_tokens, end);
      task.first_token = max(start, first_chunk_token(p));
      task.tokens = stop - task.first_token;
    }
    last = __shfl_sync(kFullWarp, end, kWarpSize - 1);
    tiles = __shfl_sync(kFullWarp, upto, kWarpSize - 1);
    if (wanted < tiles) return;
  }
}

// Finds task number `index`: tiles from the step's last token to its first, so that the longest
// contexts of a chunk start first, and the CTAs that end last have short ones.
template <typename Plan>
__device__ void find_task(const PagedAttentionParams& p, const ChunkGrid& grid, int index,
                          ChunkTask& task) {
  const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.q_heads) / kv_heads;
  if (threadIdx.x == 0) task = {0, 0, index % kv_heads, group};
  __syncwarp();
  find_tile(p, grid.tiles - 1 - index / kv_heads, Plan::kRows / group, task);
}

template <typename Plan>
__device__ void load_tokens(const PagedAttentionParams& p, const ChunkGrid& grid,
                            ChunkShared<Plan>& shared) {
  for (int i = threadIdx.x; i < shared.task.tokens; i += Plan::kThreads) {
    const Token token = load_token(p.decode_meta, shared.task.first_token + i);
    const int32_t length = kv_len(p.cache, token);
    const bool is_own = (length > grid.whole_keys) == Plan::kCuts;
    shared.rows[i] = !is_own ? kOtherKernel : length > 0 ? token.row : kDeadRow;
    shared.lengths[i] = length;
  }
}

__device__ inline int32_t warp_min(int32_t v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v = min(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

__device__ inline int32_t warp_max(int32_t v) { return -warp_min(-v); }

// The length of the step's longest context. All threads must call it, and all get the same.
template <typename Plan>
__device__ int32_t find_longest(const PagedAttentionParams& p, ChunkShared<Plan>& shared) {
  if (threadIdx.x == 0) shared.longest = 0;
  int32_t longest = 0;
  for (int64_t i = first_chunk_token(p) + threadIdx.x; i < p.tokens; i += Plan::kThreads)
    longest = max(longest, kv_len(p.cache, load_token(p.decode_meta, i)));
  longest = warp_max(longest);
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) atomicMax(&shared.longest, longest);
  __syncthreads();
  return shared.longest;
}

// Finds the run that begins at token `first` of the tile. All lanes of a warp must call it, and all
// get the run.
template <typename Plan>
__device__ Run find_run(const ChunkShared<Plan>& shared, int first) {
  const int32_t row = shared.rows[first];
  const ChunkTask task = shared.task;
  int32_t end = task.tokens, least = INT_MAX, most = 0;
  for (int i = first + threadIdx.x % kWarpSize; i < task.tokens; i += kWarpSize) {
    if (shared.rows[i] != row) end = min(end, i);
  }
  end = warp_min(end);
  for (int i = first + threadIdx.x % kWarpSize; i < end; i += kWarpSize) {
    const int32_t length = shared.lengths[i];
    least = min(least, length);
    most = max(most, length);
  }
  least = warp_min(least);
  most = warp_max(most);
  return {first, end, row, least, most, {Plan::part(least).first, Plan::part(most).end}};
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
  const Span part = is_in_run ? Plan::part(shared.lengths[token]) : Span{0, 0};
  if (threadIdx.x % kWarpSize < Plan::kWarpRows) shared.own_parts[row] = part;
  __syncwarp();
  return {{warp_max(part.first), warp_min(is_in_run ? part.end : INT_MAX)}, warp_max(part.end)};
}

// Makes a row's sums NaN where it attends to a value that is hidden (chunk_copies.cuh). Called
// after the part's last tile, when all warps have noted what they hid.
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
  copy_tile(p.cache, place, shared, 0);
  place = look_up<Plan>(p.cache, shared.run, begin + kTileKeys);
  const WarpParts own = find_parts(shared);
  for (int32_t first = begin, stage = 0; first < shared.run.part.end;
       first += kTileKeys, stage ^= 1) {
    const int32_t end = first + kTileKeys;
    wait_copies<0>();
    if constexpr (Plan::kIsScaled) {
      __syncthreads();  // no warp reads the tile before any more
      decode_codes(shared);
      if (end > shared.run.least) hide_scales<Plan>(shared.scales[stage], first, shared.poisoned);
    } else {
      if (end > shared.run.least) hide_values<Plan>(shared.values(stage), first, shared.poisoned);
    }
    __syncthreads();  // all warps' copies have arrived, and no warp reads the other stage any more
    if (end < shared.run.part.end) {
      copy_tile(p.cache, place, shared, stage ^ 1);
      place = look_up<Plan>(p.cache, shared.run, end + kTileKeys);
    }
    if (first >= own.end) continue;
    Scores<Plan> scores;
    Weights<Plan> weights;
    multiply_keys<Plan>(scores, shared.q, shared.keys(stage));
    const TileScales<kTileKeys>* scales = shared.scales_of(stage);
    if constexpr (Plan::kIsScaled) scale_scores<Plan>(scores, *scales);
    if ((Plan::kCuts && first < own.all.first) || end > own.all.end)
      hide_scores<Plan>(scores, shared.own_parts, first);
    weigh_scores<Plan>(weights, scores, state, scale, scales);
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

// Computes task number `index`. All threads of the cluster must call it.
template <typename Plan>
__device__ void attend_tile(const PagedAttentionParams& p, const ChunkGrid& grid, int index,
                            ChunkShared<Plan>& shared) {
  __syncthreads();  // no thread reads the task before any more
  if (threadIdx.x < kWarpSize) find_task<Plan>(p, grid, index, shared.task);
  __syncthreads();
  if (shared.task.tokens <= 0) return;
  load_tokens(p, grid, shared);
  for (int first = 0; first < shared.task.tokens; first = shared.run.end) {
    start_run(shared, first);
    if (shared.run.row == kOtherKernel) continue;
    RowSoftmax<Plan> state;
    state.clear();
    if (!shared.run.part.is_empty()) scan_run(p, shared, state);
    if constexpr (Plan::kCuts) {
      reduce_parts(p, shared, state);
    } else {
      if (shared.run.most > 0) finish_rows(shared, state);
      store_rows(p, shared);
    }
  }
}

// Without cuts, each CTA has one task. With cuts, there are only as many clusters as the device
// holds at a time, and they share the tasks, most of which have no such context in most steps.
template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    chunk_attention_kernel(const PagedAttentionParams p, const ChunkGrid grid) {
  auto& shared = *reinterpret_cast<ChunkShared<Plan>*>(dynamic_shared());
  if constexpr (Plan::kCuts) {
    if (find_longest(p, shared) <= grid.whole_keys) return;
    const int tasks = grid.tiles * static_cast<int>(p.kv_heads);
    const int clusters = static_cast<int>(gridDim.x) / kParts;
    for (int index = static_cast<int>(blockIdx.x) / kParts; index < tasks; index += clusters)
      attend_tile(p, grid, index, shared);
  } else {
    attend_tile(p, grid, static_cast<int>(blockIdx.x), shared);
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

// Whether there may be contexts to cut in these tables. Only the device knows how long they are.
inline bool has_cuts(const PagedAttentionParams& p) {
  return hopper_runs() && is_cut(row_capacity(p.cache));
}

template <typename Plan>
LaunchShape shape_of(int64_t clusters) {
  return {clusters * Plan::kCluster, Plan::kThreads, sizeof(ChunkShared<Plan>), Plan::kCluster};
}

// Computes the contexts that stay whole: all of them unless `cuts`.
template <typename Plan>
int launch_whole(const PagedAttentionParams& p, bool cuts, void* stream) {
  const int64_t tiles = count_tiles<Plan>(p);
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const ChunkGrid grid{static_cast<int>(tiles), cuts ? kWholeKeys : INT_MAX};
  return launch(chunk_attention_kernel<Plan>, shape_of<Plan>(tiles * p.kv_heads), stream, p, grid);
}

template <typename Plan>
int launch_cut(const PagedAttentionParams& p, void* stream) {
  const int64_t tiles = count_tiles<Plan>(p);
  if (tiles * p.kv_heads > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = chunk_attention_kernel<Plan>;
  const int64_t clusters =
      std::min<int64_t>(tiles * p.kv_heads, resident_clusters(kernel, shape_of<Plan>(1)));
  const ChunkGrid grid{static_cast<int>(tiles), kWholeKeys};
  return launch(kernel, shape_of<Plan>(clusters), stream, p, grid);
}

// Whether tiles of `Large` rows, each computed by `ctas`, keep all SMs busy. Large ones read keys
// and values less often; where there are too few, small ones take less time. The results are the
// same, to the bit.
template <typename Large>
bool fills_device(const PagedAttentionParams& p, int ctas) {
  return has_room<Large>() && ceil_div(p.tokens * p.q_heads, Large::kRows) * ctas >= sms();
}

template <typename Large, typename Small>
int launch_chunks(const PagedAttentionParams& p, void* stream) {
  const bool cuts = has_cuts(p);
  const int error = fills_device<Large>(p, 1)
                        ? launch_whole<typename Large::Whole>(p, cuts, stream)
                        : launch_whole<typename Small::Whole>(p, cuts, stream);
  if (error != 0 || !cuts) return error;
  return fills_device<Large>(p, kParts) ? launch_cut<Large>(p, stream)
                                        : launch_cut<Small>(p, stream);
}

// Of a head_dim: the plan of large tiles, and of small ones.
template <typename Large, typename Small>
int launch_plans(const PagedAttentionParams& p, void* stream) {
  static_assert(Small::kRows == kChunkSharers &&
                sizeof(ChunkShared<Small>) ==
                    chunk_shared_bytes(Small::kHeadDim, Small::kIsScaled));
  return launch_chunks<Large, Small>(p, stream);
}

}  // namespace photon::cuda
