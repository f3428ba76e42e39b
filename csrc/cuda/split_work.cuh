// What one block of split attention does at a time: a run of splits of the past of a line, for a tile of query heads that share a KV head.
#pragma once
#include "common/kv_split.h"
#include "cuda/rotate.cuh"
#include "cuda/split_attention.cuh"

namespace photon::cuda {

constexpr int kSplitThreads = 128;
constexpr int kSplitWarps = kSplitThreads / kWarpSize;
constexpr int kSplitStep = kSplitWarps * kTileTokens;  // the warps of a block take its tiles in turn

static_assert(kSplitUnit % kSplitStep == 0, "a warp's tiles are as far apart across splits as within one");

struct SplitGrid {
  unsigned teams, tiles;  // a team: the runs of a tile of query heads of a line
  int splits;             // of a long past
  int busy_blocks;        // how many blocks are to have work
};

// How long the runs of this step are: so that all lines together keep the device busy, whatever their lengths. That moves work between
// blocks and no bit: what a split adds up to, and the order in which splits meet, depend on its line's length alone.
struct RunSize {
  int tokens;  // of a run, before it is rounded up to whole splits
  int most;    // runs of a line

  __device__ static int splits_of(int32_t length, const SplitGrid& grid) {
    const int32_t tokens = split_tokens(length, grid.splits);
    return (length + tokens - 1) / tokens;
  }

  __device__ int splits_each(int32_t length, const SplitGrid& grid) const {
    const int32_t split = split_tokens(length, grid.splits);
    return tokens <= split ? 1 : (tokens + split - 1) / split;
  }

  __device__ int runs_of(int32_t length, const SplitGrid& grid) const {
    const int each = splits_each(length, grid);
    return (splits_of(length, grid) + each - 1) / each;
  }

  // All warps compute the same.
  __device__ static RunSize of_step(const FusedAttentionDecodeParams& p, const SplitGrid& grid) {
    const int lane = threadIdx.x % kWarpSize, lines = static_cast<int>(p.lines);
    float total = 0.0f;
#pragma unroll 1
    for (int i = lane; i < lines; i += kWarpSize) total += static_cast<float>(past_length(p.cache, load_line(p.decode_meta, i)));
    const float positions = warp_sum(total) * static_cast<float>(grid.teams) / static_cast<float>(lines);
    RunSize size{static_cast<int>(positions / static_cast<float>(grid.busy_blocks)) + 1, 1};
#pragma unroll 1
    for (int i = lane; i < lines; i += kWarpSize) {
      size.most = max(size.most, size.runs_of(past_length(p.cache, load_line(p.decode_meta, i)), grid));
    }
    size.most = __reduce_max_sync(kFullWarp, size.most);
    return size;
  }
};

// A run: splits [split, end_split) of its line.
struct Run {
  unsigned team;
  int line, kv_head, first_head, heads;  // first_head: of the line's query heads
  int index, split, end_split, runs;     // runs: of its line

  template <int kQueries>
  __device__ static Run of(const FusedAttentionDecodeParams& p, const SplitGrid& grid, unsigned item) {
    const unsigned kv_heads = static_cast<unsigned>(p.kv_heads), group = static_cast<unsigned>(p.q_heads) / kv_heads;
    const unsigned run = item / grid.teams, team = item % grid.teams, tile = team % grid.tiles, head = team / grid.tiles;
    const unsigned kv_head = head % kv_heads, left = group - tile * kQueries;
    return {team,
            static_cast<int>(head / kv_heads),
            static_cast<int>(kv_head),
            static_cast<int>(kv_head * group + tile * kQueries),
            static_cast<int>(left < kQueries ? left : kQueries),
            static_cast<int>(run),
            0,
            0,
            0};
  }
};

template <int kHeadDim, int kColumns>
struct SplitShared {
  static constexpr int kQueries = kColumns * kColumnQueries;
  static constexpr int kQueryStride = kHeadDim + (kHeadDim % 64 == 0 ? 32 : 0);  // 64 bytes off a multiple of all banks
  static constexpr int kSumStride = kHeadDim + 4;

  alignas(16) Bf16 q[kQueries][kQueryStride];
  Bf16 q_norm[kHeadDim], k_norm[kHeadDim];  // the same for all items
  alignas(16) Bf16 new_k[kHeadDim];
  alignas(16) Bf16 new_v[kHeadDim];
  alignas(16) float sums[kSplitWarps][kQueries][kSumStride];
  float highs[kSplitWarps][kQueries];
  float weights[kSplitWarps][kQueries];
  // The run's splits so far, by quad (merge_splits in split_attention.cu); each is read and written by one thread alone.
  alignas(16) float4 run_sums[kQueries * kHeadDim / 4];
  float2 run_weights[kQueries * kHeadDim / 4];
  bool is_last;
};

// A run as one lane sees it. What is read from memory is requested long before it is used: the warp's first tile, and the line's own
// query, key and value. The last warp also has the new key, and the one before it the new value.
template <int kHeadDim, int kColumns>
struct SplitWork {
  static constexpr int kQueries = kColumns * kColumnQueries;
  static constexpr int kWarpQueries = kQueries / kSplitWarps;
  using Shared = SplitShared<kHeadDim, kColumns>;

  Run run;
  Line line;
  int32_t length, tokens;  // of the past; of a split
  int32_t first, end;      // the warp's next position, and the run's end
  int32_t new_position;    // -1: it is not in the past
  bool alive, owns_new;
  uint32_t next;  // where the warp's next tile is
  KvTile<kHeadDim> tile;
  LaneAngles angles;
  LanePairs<Bf16> q[kWarpQueries], own;

  __device__ static int warp() { return threadIdx.x / kWarpSize; }

  __device__ uint32_t find(const FusedAttentionDecodeParams& p, int32_t from) const {
    return find_tile(p.cache, line.row, run.kv_head, from, end, new_position);
  }

  // Takes up an item, from what no kernel of the chain writes; false if it has nothing to do. All threads agree.
  __device__ bool take(const FusedAttentionDecodeParams& p, const SplitGrid& grid, const RunSize& size, unsigned item) {
    run = Run::of<kQueries>(p, grid, item);
    line = load_line(p.decode_meta, run.line);
    length = past_length(p.cache, line);
    tokens = split_tokens(length, grid.splits);
    const int splits = size.splits_of(length, grid), each = size.splits_each(length, grid);
    run.split = run.index * each;
    run.end_split = min(run.split + each, splits);
    run.runs = size.runs_of(length, grid);
    if (run.split >= splits && run.index > 0) return false;
    const int32_t begin = run.split * tokens;
    first = begin + warp() * kTileTokens;
    end = min(length, run.end_split * tokens);
    new_position = line.position < length ? line.position : -1;
    const uint32_t here = find(p, first);
    next = find(p, first + kSplitStep);
    alive = decode_length(p.cache, p.rope, line) > 0;  // one more page looked up, while those of the tiles are
    if (!alive) return run.index == 0;
    const int32_t owned = new_position >= 0 ? new_position : length - 1;
    owns_new = owned >= begin && owned < end;
    const LaneId lane = lane_id();
    tile.load_keys(p.cache, here, lane);
    tile.load_values(p.cache, here, lane);
    angles = LaneAngles::load(p.rope, line.position, kHeadDim);
    return true;
  }

  // Requests the line's own vectors, which the kernel before this one writes.
  __device__ void load_vectors(const FusedAttentionDecodeParams& p) {
    const Bf16* heads = static_cast<const Bf16*>(p.q) + run.line * p.q_line_stride + run.first_head * p.q_head_stride;
#pragma unroll
    for (int i = 0; i < kWarpQueries; ++i) {
      const int h = warp() + i * kSplitWarps;
      q[i] = LanePairs<Bf16>::load(heads + h * p.q_head_stride, kHeadDim, h < run.heads);
    }
    const bool is_key = warp() == kSplitWarps - 1;
    const Bf16* k = static_cast<const Bf16*>(p.k) + run.line * p.k_line_stride + run.kv_head * p.k_head_stride;
    const Bf16* v = static_cast<const Bf16*>(p.v) + run.line * p.v_line_stride + run.kv_head * p.v_head_stride;
    own = LanePairs<Bf16>::load(is_key ? k : v, kHeadDim, owns_new && warp() >= kSplitWarps - 2);
  }

  // What stage() of every item reads; a barrier must follow.
  __device__ static void stage_norms(const FusedAttentionDecodeParams& p, Shared& shared) {
    for (int d = threadIdx.x; d < kHeadDim; d += kSplitThreads) {
      if (p.rope.q_norm != nullptr) shared.q_norm[d] = static_cast<const Bf16*>(p.rope.q_norm)[d];
      if (p.rope.k_norm != nullptr) shared.k_norm[d] = static_cast<const Bf16*>(p.rope.k_norm)[d];
    }
  }

  // Rotated queries to shared memory, and where this block owns the new position its key and value, there and (by one tile of heads) into
  // the cache. No block reads them back from there.
  __device__ void stage(const FusedAttentionDecodeParams& p, Shared& shared) const {
    const bool q_normed = p.rope.q_norm != nullptr, k_normed = p.rope.k_norm != nullptr;
    const LanePairs<Bf16> q_norm = LanePairs<Bf16>::load(shared.q_norm, kHeadDim, q_normed);
#pragma unroll
    for (int i = 0; i < kWarpQueries; ++i) {
      rotate_pairs(q[i], q_normed, q_norm, angles, p.rope.eps, kHeadDim).store(shared.q[warp() + i * kSplitWarps], kHeadDim);
    }
    if (!owns_new || warp() < kSplitWarps - 2) return;
    const bool appends = run.first_head % (p.q_heads / p.kv_heads) == 0;
    const KvPlace place = find_place(p.cache, line.row, line.position);
    if (warp() == kSplitWarps - 1) {
      const LanePairs<Bf16> k_norm = LanePairs<Bf16>::load(shared.k_norm, kHeadDim, k_normed);
      const LanePairs<Bf16> key = rotate_pairs(own, k_normed, k_norm, angles, p.rope.eps, kHeadDim);
      key.store(shared.new_k, kHeadDim);
      if (appends) key.store(static_cast<Bf16*>(p.cache.k) + place.k_offset(p.cache, run.kv_head), kHeadDim);
    } else {
      own.store(shared.new_v, kHeadDim);
      if (appends) own.store(static_cast<Bf16*>(p.cache.v) + place.v_offset(p.cache, run.kv_head), kHeadDim);
    }
  }

  // The warp's part of one split, its tile always one ahead, of the next split too.
  __device__ void attend(const FusedAttentionDecodeParams& p, const Shared& shared, int split, WarpSoftmax<kHeadDim, kColumns>& state) {
    const LaneId lane = lane_id();
    const float scale_log2 = p.scale * kLog2E;
    const int32_t stop = min(length, (split + 1) * tokens);
#pragma unroll 1
    for (; first < stop; first += kSplitStep) {
      const uint32_t after = find(p, first + 2 * kSplitStep);
      const int32_t new_token = new_position - first;
      const bool has_new = new_token >= 0 && new_token < kTileTokens;
      if (has_new) tile.patch_keys(new_token, shared.new_k, lane);
      float scores[kColumns][4];
      state.score(scores, tile, shared.q, lane);
      const bool present[2] = {tile.present[0], tile.present[1]};
      tile.load_keys(p.cache, next, lane);
      state.weigh(scores, present, scale_log2, lane);
      if (has_new) tile.patch_values(new_token, shared.new_v, lane);
      state.add(tile);
      tile.load_values(p.cache, next, lane);
      next = after;
    }
  }
};

}  // namespace photon::cuda
