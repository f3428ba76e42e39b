// Which splits of which tokens a CTA of split attention takes. A work item is the positions of one
// step of a CTA. The work items of all split-KV groups, laid end to end, are cut into as many equal
// CTA ranges as there are CTAs, and a split belongs to the range in which it begins. Where that is
// about as even, or of many tokens no context is longer than a CTA range and the slack, a CTA takes
// whole split-KV groups instead (split_ranges.cuh). Where split-KV groups are few, each has a
// cluster of CTAs, which divide its splits (split_reduction.cuh). Which way is taken changes no bit
// of a result, because what a split adds up to, and the order in which splits are reduced, depend
// on the token's length alone; but where a batch sums in an order of its own (batch_sums.cuh).
#pragma once
#include "common/kv_split.h"
#include "cuda/attention/split_grid.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {

// How a token's context is cut.
struct TokenCut {
  unsigned items = 0, split_items = 1;  // of the context, and of every split but the last
  int splits = 0;

  __device__ static TokenCut of(const SplitGrid& grid, int32_t length) {
    const bool is_few = length <= kFewTokens;
    TokenCut cut;
    cut.items = grid.items_of(length);
    cut.split_items = max(is_few ? (cut.items + kFewSplits - 1) / kFewSplits
                                 : grid.splits.divides(cut.items + grid.splits.of - 1),
                          1u);
    cut.splits = cut.splits_of(cut.items);
    return cut;
  }

  // How many splits begin in so many of its first work items. A division takes a hundred clocks, so
  // that up to four work items a split a multiplication replaces it. It is exact there: work items
  // are 4 * kMaxSplits at most, and a third is rounded up by less than 2^-16.
  __device__ int splits_of(unsigned some) const {
    constexpr unsigned kBits = 16, kThird = ((1u << kBits) + 2) / 3;
    const unsigned above = some + split_items - 1;
    if (split_items > 4) return static_cast<int>(above / split_items);
    return static_cast<int>(above * (split_items == 3 ? kThird : 1u << kBits >> split_items / 2) >>
                            kBits);
  }

  // The cut that a lane of the warp has.
  __device__ TokenCut of_lane(int lane) const {
    TokenCut cut;
    cut.items = __shfl_sync(kFullWarp, items, lane);
    cut.split_items = __shfl_sync(kFullWarp, split_items, lane);
    cut.splits = __shfl_sync(kFullWarp, splits, lane);
    return cut;
  }

  __device__ int32_t split_tokens(const SplitGrid& grid) const {
    return static_cast<int32_t>(split_items << grid.item_bits);
  }

  // The first split of a rank of a cluster that has all of them.
  __device__ int split_of(const SplitGrid& grid, int rank) const {
    return splits * rank >> grid.rank_bits;
  }

  // What the busiest rank has to do, in work items, of a context of this length. A longer one than
  // kFewTokens may have more splits than a CTA of a cluster has room for (ReductionMemory).
  __device__ unsigned rank_items(const SplitGrid& grid, int32_t length) const {
    return length <= kFewTokens ? grid.each_rank(splits) * split_items : INT32_MAX;
  }
};

// A CTA's range of the work of all split-KV groups: some of their work items; or, where that is
// about as even, whole split-KV groups, whose splits need no reduction across CTAs then.
struct CtaSplits {
  // How many more positions a CTA may take in a cluster than in an even division, because that
  // saves the reduction in global memory.
  static constexpr unsigned kClusterTokens = 256;

  // In work items; or in split-KV groups, of which with many tokens the end is that of all CTA
  // ranges.
  unsigned each, begin, end;
  bool in_clusters;      // a cluster has a split-KV group
  bool of_split_groups;  // a CTA has whole split-KV groups
  bool is_equal;         // all contexts have as many work items; known of many tokens alone
  bool has_dead;         // there are tokens that attend to nothing

  // All warps of all CTAs compute the same. `own` comes empty; where tokens are no more than lanes,
  // each lane gets the cut of its token in it.
  template <bool kMany>
  __device__ static CtaSplits of_cta(const SplitGrid& grid, TokenCut& own) {
    if constexpr (kMany) return of_many(grid);
    unsigned items = 0, live = 0, rank_items = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < grid.tokens; i += kWarpSize) {
      const int32_t length = grid.kv_len(i);
      own = TokenCut::of(grid, length);
      items += own.items;
      live += own.items > 0 ? 1 : 0;
      rank_items = max(rank_items, own.rank_items(grid, length));
    }
    live = __reduce_add_sync(kFullWarp, live);
    const unsigned each_items =
        divide_each(grid, __reduce_add_sync(kFullWarp, items) * grid.token_split_groups.of);
    const unsigned each_split_groups = divide_each(grid, live * grid.token_split_groups.of);
    const bool in_clusters =
        grid.rank_bits > 0 &&
        fits_cluster(grid, __reduce_max_sync(kFullWarp, rank_items), each_items);
    const bool of_split_groups =
        uint64_t{__reduce_max_sync(kFullWarp, own.items)} * each_split_groups <=
        each_items + grid.slack;
    const unsigned each = of_split_groups ? each_split_groups : each_items;
    return {each,
            blockIdx.x * each,
            blockIdx.x * each + each,
            in_clusters,
            of_split_groups,
            false,
            live < static_cast<unsigned>(grid.tokens)};
  }

  // The same in shared memory of the warp, where it takes no register through the loop.
  __device__ const CtaSplits& kept_in(CtaSplits& place) const {
    if (threadIdx.x % kWarpSize == 0) place = *this;
    __syncwarp();
    return place;
  }

  // How much of a CTA range a split-KV group is, in the units of `each`.
  __device__ unsigned size_of(unsigned items) const {
    return of_split_groups ? min(items, 1u) : items;
  }

 private:
  // The same for more tokens than lanes. Few instructions, because each of them is fetched from L2
  // before the first page is requested; and two tokens are requested before one is looked at.
  __device__ static CtaSplits of_many(const SplitGrid& grid) {
    unsigned items = 0, live = 0;
    int32_t longest = 0;
    const auto add = [&](int32_t length) {
      items += grid.items_of(length);
      live += length > 0 ? 1 : 0;
      longest = max(longest, length);
    };
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < grid.tokens; i += 2 * kWarpSize) {
      const int32_t first = grid.kv_len(i),
                    other = grid.kv_len(min(i + kWarpSize, grid.tokens - 1));
      add(first);
      add(i + kWarpSize < grid.tokens ? other : 0);
    }
    items = __reduce_add_sync(kFullWarp, items);
    live = __reduce_add_sync(kFullWarp, live);
    longest = __reduce_max_sync(kFullWarp, longest);
    const unsigned longest_items = grid.items_of(longest),
                   each = divide_each(grid, items * grid.token_split_groups.of);
    const bool in_clusters =
        grid.rank_bits > 0 &&
        fits_cluster(grid, TokenCut::of(grid, longest).rank_items(grid, longest), each);
    const bool is_equal = items == longest_items * grid.tokens;
    const bool of_split_groups = !in_clusters && longest_items <= each + grid.slack &&
                                 (is_equal || grid.tokens <= TokenOrder::kTokens);
    return {each,
            blockIdx.x * each,
            of_split_groups ? live * grid.token_split_groups.of : blockIdx.x * each + each,
            in_clusters,
            of_split_groups,
            is_equal,
            live < static_cast<unsigned>(grid.tokens)};
  }

  __device__ static bool fits_cluster(const SplitGrid& grid, unsigned rank_items,
                                      unsigned each_items) {
    return rank_items <= each_items + (kClusterTokens >> grid.item_bits);
  }

  __device__ static unsigned divide_each(const SplitGrid& grid, unsigned things) {
    return max(grid.blocks.divides(things + grid.blocks.of - 1), 1u);
  }
};

// Goes through a tile range, in steps of equally many positions; a split is a whole number of
// steps.
struct RangeSteps {
  int split;
  int32_t split_end, split_tokens;
  int32_t at, end;  // positions: of the step, and where the tile range ends

  // Whether this step was a split's last one.
  __device__ bool advance(int32_t tokens) {
    at += tokens;
    if (at < split_end && at < end) return false;
    ++split;
    split_end += split_tokens;
    return true;
  }

  __device__ bool is_done() const { return at >= end; }
};

// A CTA's tile ranges one after the other. A tile range is the splits [split, end_split) of a
// split-KV group. All threads hold the same.
struct RangeCursor {
  int index;             // of the token; grid.tokens: there are no more tile ranges
  unsigned split_group;  // of the token
  union {
    // where the CTA range's count of work items or split-KV groups comes to it
    unsigned split_group_begin;
    unsigned turn;  // that the split-KV group is taken in (split_ranges.cuh)
  };
  Token token;
  int32_t length;  // of the context
  TokenCut cut;
  int split, end_split;

  // Finds the CTA range's first tile range; in a cluster, the CTA's part of the cluster's split-KV
  // group, which CTAs without splits get to know, too. `own`: as in CtaSplits::of_cta().
  template <bool kMany>
  __device__ void seek(const SplitGrid& grid, const CtaSplits& cta_splits, const TokenCut& own) {
    if (cta_splits.in_clusters) return seek_cluster(grid, own);
    split_group_begin = 0;
    seek_token<kMany>(grid, cta_splits, own);
    if (index >= grid.tokens) return;
    open_first_token(grid, own);
    split_group = cta_splits.begin - split_group_begin;
    split = 0;
    if (cta_splits.of_split_groups) {
      split_group_begin = cta_splits.begin;
    } else {
      const unsigned within = split_group;
      split_group = within / cut.items;
      split_group_begin += split_group * cut.items;
      split = cut.splits_of(cta_splits.begin - split_group_begin);
    }
    close_range(cta_splits);
    if (split >= cut.splits) next(grid, cta_splits);
    if (split >= end_split) index = grid.tokens;
  }

  // Takes a whole split-KV group of a live token.
  __device__ void open_whole(const SplitGrid& grid, int token_index, unsigned group) {
    index = token_index;
    split_group = group;
    open_token(grid);
    split = 0;
    end_split = cut.splits;
  }

  // There are no more tile ranges.
  __device__ void close(const SplitGrid& grid) { index = grid.tokens; }

  // Whether the CTA range has ended is asked first, because many dead tokens may follow its last
  // live one, and each of them would cost a load.
  __device__ void next(const SplitGrid& grid, const CtaSplits& cta_splits) {
    split_group_begin += cta_splits.size_of(cut.items);
    if (cta_splits.in_clusters || split_group_begin >= cta_splits.end) {
      index = grid.tokens;
      return;
    }
    split = 0;
    if (++split_group == grid.token_split_groups.of) {
      split_group = 0;
      ++index;
      while (index < grid.tokens && grid.kv_len(index) == 0) ++index;
      if (index < grid.tokens) open_token(grid);
    }
    close_range(cta_splits);
  }

  __device__ bool has_range(const SplitGrid& grid) const {
    return index < grid.tokens && split < end_split;
  }
  __device__ int32_t begin_position(const SplitGrid& grid) const {
    return split * cut.split_tokens(grid);
  }
  __device__ int32_t end_position(const SplitGrid& grid) const {
    return min(length, end_split * cut.split_tokens(grid));
  }
  __device__ RangeSteps steps(const SplitGrid& grid) const {
    const int32_t begin = begin_position(grid), tokens = cut.split_tokens(grid);
    return {split, begin + tokens, tokens, begin, end_position(grid)};
  }

  // The token's own position; -1: it is not in the context.
  __device__ int32_t new_position() const {
    return token.position >= 0 && token.position < length ? token.position : -1;
  }

  // How many CTAs have tile ranges of the split-KV group.
  __device__ int ranges(const CtaSplits& cta_splits) const {
    if (cta_splits.of_split_groups) return 1;
    if (cut.split_items > cta_splits.each) return cut.splits;
    const unsigned last = split_group_begin + (cut.splits - 1) * cut.split_items;
    return static_cast<int>(last / cta_splits.each - split_group_begin / cta_splits.each) + 1;
  }

 private:
  __device__ void seek_cluster(const SplitGrid& grid, const TokenCut& own) {
    const unsigned cluster = blockIdx.x >> grid.rank_bits;
    const int rank = static_cast<int>(cluster_rank());
    index = static_cast<int>(grid.token_split_groups.divides(cluster));
    split_group = cluster - index * grid.token_split_groups.of;
    split_group_begin = 0;
    split = end_split = 0;
    if (index >= grid.tokens) return;
    open_first_token(grid, own);
    split = cut.split_of(grid, rank);
    end_split = cut.split_of(grid, rank + 1);
  }

  // Finds the token in which the CTA range begins, and where that token begins in the count of work
  // items or split-KV groups. The whole warp must call it.
  template <bool kMany>
  __device__ void seek_token(const SplitGrid& grid, const CtaSplits& cta_splits,
                             const TokenCut& own) {
    const int lane = threadIdx.x % kWarpSize;
    int from = 0;
#pragma unroll 1
    do {
      unsigned items = own.items;
      if (kMany) items = from + lane < grid.tokens ? grid.items_of(grid.kv_len(from + lane)) : 0;
      const unsigned size = cta_splits.size_of(items) * grid.token_split_groups.of;
      unsigned end = size;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const unsigned before = __shfl_up_sync(kFullWarp, end, offset);
        if (lane >= offset) end += before;
      }
      const unsigned beyond = __ballot_sync(kFullWarp, split_group_begin + end > cta_splits.begin);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        index = from + found;
        split_group_begin += __shfl_sync(kFullWarp, end - size, found);
        return;
      }
      split_group_begin += __shfl_sync(kFullWarp, end, kWarpSize - 1);
      from += kWarpSize;
    } while (kMany && from < grid.tokens);
    index = grid.tokens;
  }

  __device__ void open_token(const SplitGrid& grid) {
    token = load_token(grid.decode_meta, index);
    length = grid.cache.kv_len(token);
    cut = TokenCut::of(grid, length);
  }

  // The same, where a lane may have the token's cut already.
  __device__ void open_first_token(const SplitGrid& grid, const TokenCut& own) {
    if (grid.tokens > kWarpSize) return open_token(grid);
    token = load_token(grid.decode_meta, index);
    length = grid.cache.kv_len(token);
    cut = own.of_lane(index);
  }

  __device__ void close_range(const CtaSplits& cta_splits) {
    const unsigned left = cta_splits.end - min(split_group_begin, cta_splits.end);
    end_split = left > 0 ? cut.splits : 0;
    if (!cta_splits.of_split_groups && left < cut.items) end_split = cut.splits_of(left);
  }
};

// The query heads of a split-KV group.
struct SplitGroupHeads {
  int kv_head, first, count;  // first: of the token's query heads

  __device__ static SplitGroupHeads of(const SplitGrid& grid, unsigned split_group,
                                       int tile_queries) {
    SplitGroupHeads heads;
    heads.kv_head = static_cast<int>(grid.tiles.divides(split_group));
    const int in_group =
        static_cast<int>(split_group - heads.kv_head * grid.tiles.of) * tile_queries;
    heads.first = heads.kv_head * grid.group + in_group;
    heads.count = min(grid.group - in_group, tile_queries);
    return heads;
  }

  // Whether it is the KV head's first split-KV group.
  __device__ bool leads(const SplitGrid& grid) const { return first == kv_head * grid.group; }
};

}  // namespace photon::cuda
