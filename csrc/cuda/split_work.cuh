// What one block of split attention does at a time: a run of splits of the past of a line, for a tile of query heads that share a KV head.
#pragma once
#include "common/kv_split.h"
#include "cuda/rotate.cuh"
#include "cuda/split_attention.cuh"

namespace photon::cuda {

constexpr int kSplitThreads = 128;
constexpr int kSplitWarps = kSplitThreads / kWarpSize;

// Vectors of lines and heads, in the strides of a tensor.
template <typename T>
struct LineHeads {
  T* base;
  int line_stride, head_stride;

  LineHeads(T* base, int64_t line_stride, int64_t head_stride)
      : base(base), line_stride(static_cast<int>(line_stride)), head_stride(static_cast<int>(head_stride)) {}

  __device__ T* at(int line, int head) const {
    return base + static_cast<int64_t>(line) * line_stride + static_cast<int64_t>(head) * head_stride;
  }
};

// What the host has worked out, in 32 bits. A team: the runs of a tile of query heads of a line.
struct SplitGrid {
  unsigned teams;
  int lines, q_heads, group;  // group: query heads of a KV head
  Divisor line_teams, tiles;  // teams of a line, and of a KV head
  Divisor splits;             // of a long past
  float share;                // teams of a line for each block that is to have work
  SplitCache cache;
  LineHeads<const Bf16> q, k, v;
  LineHeads<Bf16> out;
};

// How a line's past is cut, in positions and in splits. `run_tokens` moves work between blocks and no bit: what a split adds up to, and the
// order in which splits meet, depend on the line's length alone.
struct LineCut {
  int tokens, splits;  // of a split; of the line
  int each, runs;      // splits of a run; runs of the line

  __device__ static LineCut of(const SplitGrid& grid, int32_t length, int run_tokens) {
    LineCut cut;
    cut.tokens = split_tokens_of(grid, length);
    cut.splits = divide_up(length, cut.tokens);
    cut.each = max(divide_up(run_tokens, cut.tokens), 1);
    cut.runs = divide_up(cut.splits, cut.each);
    return cut;
  }

 private:
  __device__ static int divide_up(unsigned a, unsigned b) { return static_cast<int>((a + b - 1) / b); }

  // split_tokens() of common/kv_split.h.
  __device__ static int split_tokens_of(const SplitGrid& grid, int32_t length) {
    const unsigned even = grid.splits.divides(length + grid.splits.of - 1), unit = kSplitUnit;
    return static_cast<int>(even <= unit ? unit : (even + unit - 1) / unit * unit);
  }
};

// How long the runs of this step are: so that all lines together keep the device busy, whatever their lengths.
struct RunSize {
  int tokens;     // of a run, before it is rounded up to whole splits
  unsigned most;  // runs of a line, at most

  // All warps compute the same.
  __device__ static RunSize of_step(const int32_t* decode_meta, const SplitGrid& grid) {
    float total = 0.0f;
    int longest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < grid.lines; i += kWarpSize) {
      const int32_t length = grid.cache.past_length(load_line(decode_meta, i));
      total += static_cast<float>(length);
      longest = max(longest, length);
    }
    const int tokens = static_cast<int>(warp_sum(total) * grid.share) + 1;
    longest = __reduce_max_sync(kFullWarp, longest);
    return {tokens, max(static_cast<unsigned>(longest + tokens - 1) / static_cast<unsigned>(tokens), 1u)};
  }
};

// A run: splits [split, end_split) of its line.
struct Run {
  unsigned team;
  int line, kv_head, first_head, heads;  // first_head: of the line's query heads
  int index, split, end_split;
};

template <int kHeadDim, int kColumns>
struct SplitShared {
  static constexpr int kQueries = kColumns * kColumnQueries;
  static constexpr int kSumStride = kHeadDim + 4;

  QueryFragments<kHeadDim> queries;
  alignas(16) Bf16 new_k[kHeadDim];
  alignas(16) Bf16 new_v[kHeadDim];
  // Of each warp, for as many splits as there is room: [split * heads + head]. The warps meet when it is full.
  alignas(16) float sums[kSplitWarps][kQueries][kSumStride];
  Weight weights[kSplitWarps][kQueries];
  // Of the run so far, by quad; each is read and written by one thread alone.
  QuadSoftmax totals[kQueries * kHeadDim / 4];
  bool is_last;
};

// A run as one lane sees it. What is read from memory is requested long before it is used: the warp's first step, and the line's own
// vectors, which are the queries, the new key and the new value, and which the warps take in turn.
template <int kHeadDim, int kColumns, int kTiles>
struct SplitWork {
  static constexpr int kQueries = kColumns * kColumnQueries;
  static constexpr int kVectors = (kQueries + 2 + kSplitWarps - 1) / kSplitWarps;  // of a warp
  static constexpr int kWarpTokens = kTiles * kTileTokens;
  static constexpr int kStepTokens = kSplitWarps * kWarpTokens;
  using Shared = SplitShared<kHeadDim, kColumns>;
  using Softmax = WarpSoftmax<kHeadDim, kColumns, kTiles>;

  static_assert(kSplitUnit % kStepTokens == 0, "a warp's steps are as far apart across splits as within one");

  Run run;
  LineCut cut;
  Line line;
  int32_t length;        // of the past
  int32_t first, end;    // the warp's next position, and the run's end
  int32_t new_position;  // -1: it is not in the past
  int vectors;           // of all warps
  KvPlaces own;          // the new position's
  KvPlaces next;         // where the warp's next step is, and which of its tokens there are
  uint32_t present, next_present;
  KvStep<kHeadDim, kTiles> step;
  LaneAngles angles;
  LanePairs<Bf16> q_norm, k_norm, vector[kVectors];
  const Bf16* vector_at[kVectors];

  __device__ static int warp() { return threadIdx.x / kWarpSize; }

  // Of the tokens from `from` on; the bits of `there` say which of them are in the cache.
  __device__ KvPlaces find(const SplitGrid& grid, int32_t from, uint32_t& there) const {
    const int32_t position = from + static_cast<int32_t>(threadIdx.x % kWarpTokens);
    KvPlaces places = {kAbsent, kAbsent};
    if (position < end && position != new_position) places = grid.cache.find(line.row, run.kv_head, position);
    there = __ballot_sync(kFullWarp, places.k != kAbsent);
    return places;
  }

  // Takes up an item, from what no kernel of the chain writes; false if it has nothing to do but to write zeros or nothing at all. All
  // threads agree.
  __device__ bool take(const FusedAttentionDecodeParams& p, const SplitGrid& grid, int run_tokens, unsigned team, int index) {
    run.team = team;
    run.index = index;
    run.line = static_cast<int>(grid.line_teams.divides(team));
    const unsigned in_line = team - run.line * grid.line_teams.of;
    run.kv_head = static_cast<int>(grid.tiles.divides(in_line));
    const int tile_head = static_cast<int>(in_line - run.kv_head * grid.tiles.of) * kQueries;
    run.first_head = run.kv_head * grid.group + tile_head;
    run.heads = min(grid.group - tile_head, kQueries);
    line = load_line(p.decode_meta, run.line);
    length = grid.cache.past_length(line);
    cut = LineCut::of(grid, length, run_tokens);
    run.split = index * cut.each;
    run.end_split = min(run.split + cut.each, cut.splits);
    const int32_t begin = run.split * cut.tokens;
    first = begin + warp() * kWarpTokens;
    end = min(length, run.end_split * cut.tokens);
    new_position = line.position < length ? line.position : -1;
    const KvPlaces here = find(grid, first, present);
    next = find(grid, first + kStepTokens, next_present);
    own = {kAbsent, kAbsent};  // one more page looked up, while those of the steps are
    if (length > 0 && can_rotate(p.rope, line)) own = grid.cache.find(line.row, run.kv_head, line.position);
    if (own.k == kAbsent || run.split >= cut.splits) return false;
    const LaneId lane = lane_id();
    step.load_keys(grid.cache.k, here.k, lane);
    step.load_values(grid.cache.v, here.v, lane);
    angles = LaneAngles::load(p.rope, line.position, kHeadDim);
    q_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(p.rope.q_norm), kHeadDim, p.rope.q_norm != nullptr);
    k_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(p.rope.k_norm), kHeadDim, p.rope.k_norm != nullptr);
    const int32_t owned = new_position >= 0 ? new_position : length - 1;
    vectors = run.heads + (owned >= begin && owned < end ? 2 : 0);
    const Bf16 *key = grid.k.at(run.line, run.kv_head), *value = grid.v.at(run.line, run.kv_head);
    const Bf16* query = grid.q.at(run.line, run.first_head);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int number = warp() + i * kSplitWarps;
      const Bf16* at = query + static_cast<int64_t>(number) * grid.q.head_stride;
      at = number == run.heads ? key : at;
      vector_at[i] = computed_now(number > run.heads ? value : at);
    }
    return true;
  }

  // Requests the line's own vectors, which the kernel before this one writes.
  __device__ void load_vectors() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vector[i] = LanePairs<Bf16>::load(vector_at[i], kHeadDim, warp() + i * kSplitWarps < vectors);
  }

  // Rotated queries to shared memory, and where this block owns the new position its key and value, there and (by one tile of heads) into
  // the cache. No block reads them back from there.
  __device__ void stage(const FusedAttentionDecodeParams& p, const SplitGrid& grid, Shared& shared) {
    const bool appends = run.first_head == run.kv_head * grid.group;
#pragma unroll 1
    for (int number = warp(); number < vectors; number += kSplitWarps) {
      const bool is_key = number == run.heads, is_value = number == run.heads + 1;
      LanePairs<Bf16> v = vector[0];
      if (!is_value) {
        const bool normed = (is_key ? p.rope.k_norm : p.rope.q_norm) != nullptr;
        LanePairs<Bf16> norm = q_norm;
        if (is_key) norm = k_norm;
        v = rotate_pairs(v, normed, norm, angles, p.rope.eps, kHeadDim);
      }
      if (number < run.heads) {
        v.for_elements(kHeadDim, [&](int d, Bf16 element) { shared.queries.place(number, d & ~1)[d % 2] = element; });
      } else {
        v.store(is_value ? shared.new_v : shared.new_k, kHeadDim);
        Bf16* cache = is_value ? grid.cache.v : grid.cache.k;
        if (appends) v.store(cache + static_cast<size_t>(is_value ? own.v : own.k) * kPack, kHeadDim);
      }
#pragma unroll
      for (int i = 1; i < kVectors; ++i) vector[i - 1] = vector[i];
    }
  }

  // The warp's part of one split, its step always one ahead, of the next split too.
  __device__ void attend(const SplitGrid& grid, float scale_log2, const Shared& shared, int split, Softmax& state) {
    const LaneId lane = lane_id();
    const int32_t stop = min(end, (split + 1) * cut.tokens);
#pragma unroll 1
    while (first < stop) {
      const int32_t new_token = new_position - first;
      const bool has_new = new_token >= 0 && new_token < kWarpTokens;
      first += kStepTokens;
      uint32_t after_present;
      const KvPlaces after = find(grid, first + kStepTokens, after_present);
      if (has_new) {
        step.patch_keys(new_token, shared.new_k, lane);
        present |= 1u << new_token;
      }
      typename Softmax::Scores scores;
      state.score(scores, step, shared.queries);
      if (first < end) step.load_keys(grid.cache.k, next.k, lane);
      state.weigh(scores, present, scale_log2, lane);
      if (has_new) step.patch_values(new_token, shared.new_v, lane);
      state.add(step);
      if (first < end) step.load_values(grid.cache.v, next.v, lane);
      next = after;
      present = next_present;
      next_present = after_present;
    }
  }
};

}  // namespace photon::cuda
