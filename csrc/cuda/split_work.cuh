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

  // Positions of every split but the last. It depends on the length alone, never on the other lines of the step.
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
  alignas(16) float angles[2][kHeadDim];  // cosines, sines
  alignas(16) Bf16 norms[2][kHeadDim];    // of queries, of keys
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
// queries, which the warps take in turn; the last warp also has the new key, and the one before it the new value.
template <int kHeadDim, int kColumns, int kTiles>
struct SplitWork {
  static constexpr int kQueries = kColumns * kColumnQueries;
  static constexpr int kWarpQueries = kQueries / kSplitWarps;
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
  const int32_t* pages;  // of the row
  bool owns_new;         // this warp has the new key or value
  KvPlaces own;          // the new position's
  KvPlaces next;         // where the warp's next step is, and which of its tokens there are
  uint32_t present, next_present;
  KvStep<kHeadDim, kTiles> step;
  LanePairs<Bf16> vectors[kWarpQueries + 1];  // the last one: the new key or value
  const Bf16 *query_at, *own_at;

  __device__ static int warp() { return threadIdx.x / kWarpSize; }

  // The page of this lane's token of those from `from` on.
  __device__ int32_t request(const SplitGrid& grid, int32_t from) const {
    const int32_t position = from + static_cast<int32_t>(threadIdx.x % kWarpTokens);
    return grid.cache.request(pages, line.row, position, position < end && position != new_position);
  }

  // Where they are; the bits of `there` say which of them are in the cache.
  __device__ KvPlaces places(const SplitGrid& grid, int32_t page, int32_t from, uint32_t& there) const {
    const KvPlaces places = grid.cache.places(page, run.kv_head, from + static_cast<int32_t>(threadIdx.x % kWarpTokens));
    there = __ballot_sync(kFullWarp, places.k != kAbsent);
    return places;
  }

  // Takes up an item, from what no kernel of the chain writes; false if it has nothing to do but to write zeros or nothing at all. All
  // threads agree.
  __device__ bool take(const FusedAttentionDecodeParams& p, const SplitGrid& grid, int run_tokens, unsigned team, int index,
                       Shared& shared) {
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
    pages = grid.cache.pages_of(line.row);
    const bool can_be = length > 0 && can_rotate(p.rope, line);
    const int32_t page = request(grid, first), next_page = request(grid, first + kStepTokens);
    const int32_t own_page = grid.cache.request(pages, line.row, line.position, can_be);
    if (can_be) request_angles(p.rope, shared);
    const int32_t owned = new_position >= 0 ? new_position : length - 1;
    owns_new = owned >= begin && owned < end && warp() >= kSplitWarps - 2;
    query_at = computed_now(grid.q.at(run.line, run.first_head + warp()));
    own_at = computed_now(is_key() ? grid.k.at(run.line, run.kv_head) : grid.v.at(run.line, run.kv_head));
    own = grid.cache.places(own_page, run.kv_head, line.position);
    const KvPlaces here = places(grid, page, first, present);
    next = places(grid, next_page, first + kStepTokens, next_present);
    if (own.k == kAbsent || run.split >= cut.splits) return false;
    const LaneId lane = lane_id();
    step.load_keys(grid.cache.k, here.k, lane);
    step.load_values(grid.cache.v, here.v, lane);
    return true;
  }

  // Copies of what turns and norms the vectors, 16 bytes a thread.
  __device__ void request_angles(const RopeParams& rope, Shared& shared) const {
    constexpr int kFloats = kHeadDim / 4, kNorms = kHeadDim / 8;  // copies
    static_assert(2 * kFloats <= kSplitThreads);
    const int i = threadIdx.x, within = i % kFloats * 4;
    const int64_t at = static_cast<int64_t>(line.position) * kHeadDim + within;
    if (i < 2 * kFloats) async_copy16(&shared.angles[i / kFloats][within], (i < kFloats ? rope.cos : rope.sin) + at, true);
    const void* norm = i < kNorms ? rope.q_norm : rope.k_norm;
    if (i < 2 * kNorms && norm != nullptr) {
      const int from = i % kNorms * kPack;
      async_copy16(&shared.norms[i / kNorms][from], static_cast<const Bf16*>(norm) + from, true);
    }
    commit_copies();
  }

  __device__ static bool is_key() { return warp() == kSplitWarps - 1; }

  // Requests the line's own vectors, which the kernel before this one writes.
  __device__ void load_vectors(const SplitGrid& grid) {
#pragma unroll
    for (int i = 0; i < kWarpQueries; ++i) {
      const Bf16* at = query_at + static_cast<int64_t>(grid.q.head_stride) * (i * kSplitWarps);
      vectors[i] = LanePairs<Bf16>::load(at, kHeadDim, warp() + i * kSplitWarps < run.heads);
    }
    vectors[kWarpQueries] = LanePairs<Bf16>::load(own_at, kHeadDim, owns_new);
  }

  // Rotated queries to shared memory, after a barrier behind wait_copies(), and where this block owns the new position its key and value,
  // there and (by one tile of heads) into the cache. No block reads them back from there.
  __device__ void stage(const FusedAttentionDecodeParams& p, const SplitGrid& grid, Shared& shared) {
    const bool appends = run.first_head == run.kv_head * grid.group;
#pragma unroll 1
    for (int i = 0; i <= kWarpQueries; ++i) {
      const bool is_own = i == kWarpQueries;
      const int query = warp() + i * kSplitWarps;
      if (is_own ? owns_new : query < run.heads) {
        LanePairs<Bf16> v = vectors[0];
        if (!is_own || is_key()) {
          const bool normed = (is_own ? p.rope.k_norm : p.rope.q_norm) != nullptr;
          const LanePairs<Bf16> norm = LanePairs<Bf16>::load(shared.norms[is_own ? 1 : 0], kHeadDim, normed);
          const LaneAngles angles = {LanePairs<float>::load(shared.angles[0], kHeadDim),
                                     LanePairs<float>::load(shared.angles[1], kHeadDim)};
          v = rotate_pairs(v, normed, norm, angles, p.rope.eps, kHeadDim);
        }
        if (is_own) {
          v.store(is_key() ? shared.new_k : shared.new_v, kHeadDim);
          Bf16* cache = is_key() ? grid.cache.k : grid.cache.v;
          if (appends) v.store(cache + static_cast<size_t>(is_key() ? own.k : own.v) * kPack, kHeadDim);
        } else {
          v.for_elements(kHeadDim, [&](int d, Bf16 element) { shared.queries.place(query, d & ~1)[d % 2] = element; });
        }
      }
#pragma unroll
      for (int j = 0; j < kWarpQueries; ++j) vectors[j] = vectors[j + 1];
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
      const int32_t after = request(grid, first + kStepTokens);
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
      present = next_present;
      next = places(grid, after, first + kStepTokens, next_present);
    }
  }
};

}  // namespace photon::cuda
