// Which splits of which lines a block of split attention takes. All teams' pasts, laid end to end in units of kSplitUnit positions, are cut
// into as many equal shares as there are blocks, and a split is in the share in which it begins. Where pasts are about as long, a block
// takes teams as a whole; and where teams are few, each has a cluster of blocks, among which its splits are divided (split_meeting.cuh).
// That moves work between blocks and no bit: what a split adds up to, and the order in which splits meet, depend on the line's length
// alone.
#pragma once
#include "common/kv_split.h"
#include "cuda/divisor.cuh"
#include "cuda/ptx.cuh"
#include "cuda/split_cache.cuh"

namespace photon::cuda {

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
  const int32_t* decode_meta;
  int lines, q_heads, group;  // group: query heads of a KV head
  unsigned line_teams;        // teams of a line
  Divisor tiles;              // teams of a KV head
  Divisor splits;             // of a long past
  Divisor blocks;             // of the launch
  int rank_bits;              // log2 of a cluster's blocks
  SplitCache cache;
  LineHeads<const Bf16> q, k, v;
  LineHeads<Bf16> out;

  __device__ int ranks() const { return 1 << rank_bits; }
  // What falls to a rank, of so many things, at most.
  __device__ int each_rank(int things) const { return (things + ranks() - 1) >> rank_bits; }

  // Positions that a line attends to, if it is live.
  __device__ int32_t past_length(int line) const { return cache.past_length(load_line(decode_meta, line)); }
};

__device__ inline unsigned divide_up(unsigned a, unsigned b) { return (a + b - 1) / b; }

// How a line's past is cut.
struct LineCut {
  unsigned units, split_units;  // of the past, and of every split but the last
  int splits;

  __device__ static LineCut of(const SplitGrid& grid, int32_t length) {
    LineCut cut;
    cut.units = divide_up(length, kSplitUnit);
    const bool is_few = cut.units <= kFewUnits;
    cut.split_units = max(is_few ? divide_up(cut.units, kFewSplits) : grid.splits.divides(cut.units + grid.splits.of - 1), 1u);
    cut.splits = static_cast<int>(cut.units);
    if (cut.split_units > 1) cut.splits = static_cast<int>(divide_up(cut.units, cut.split_units));
    return cut;
  }

  __device__ int32_t split_tokens() const { return static_cast<int32_t>(split_units * kSplitUnit); }

  // The first split of a rank of a cluster that has all of them.
  __device__ int split_of(const SplitGrid& grid, int rank) const { return splits * rank >> grid.rank_bits; }

  // What the busiest rank has to do, in units.
  __device__ unsigned rank_units(const SplitGrid& grid) const { return grid.each_rank(splits) * split_units; }
};

// A block's part of the work of all teams: of their units, or where that is about as even, of the teams as a whole, so that no team's
// splits have to meet.
struct Share {
  // So much longer may a block of a cluster take, or one with whole teams, because it saves the meeting in global memory.
  static constexpr unsigned kClusterUnits = 4, kTeamUnits = 2;

  unsigned each, begin, end;  // in units; or in teams
  bool in_clusters;           // a cluster has a team
  bool of_teams;              // a team is one block's
  bool has_dead;              // there are lines that attend to nothing

  // All warps compute the same, and all blocks.
  __device__ static Share of_block(const SplitGrid& grid) {
    unsigned units = 0, live = 0, rank_units = 0, longest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < grid.lines; i += kWarpSize) {
      const LineCut cut = LineCut::of(grid, grid.past_length(i));
      units += cut.units;
      live += cut.units > 0 ? 1 : 0;
      longest = max(longest, cut.units);
      rank_units = max(rank_units, cut.units <= kFewUnits ? cut.rank_units(grid) : INT32_MAX);
    }
    live = __reduce_add_sync(kFullWarp, live);
    const unsigned each_units = divide_each(grid, __reduce_add_sync(kFullWarp, units) * grid.line_teams);
    const unsigned each_teams = divide_each(grid, live * grid.line_teams);
    const bool in_clusters = grid.rank_bits > 0 && __reduce_max_sync(kFullWarp, rank_units) <= each_units + kClusterUnits;
    const bool of_teams = uint64_t{__reduce_max_sync(kFullWarp, longest)} * each_teams <= each_units + kTeamUnits;
    const unsigned each = of_teams ? each_teams : each_units;
    return {each, blockIdx.x * each, blockIdx.x * each + each, in_clusters, of_teams, live < static_cast<unsigned>(grid.lines)};
  }

  // What a team counts for.
  __device__ unsigned size_of(unsigned units) const { return of_teams ? min(units, 1u) : units; }

 private:
  __device__ static unsigned divide_each(const SplitGrid& grid, unsigned things) {
    return max(grid.blocks.divides(things + grid.blocks.of - 1), 1u);
  }
};

// The way through a run, in steps of as many positions for each crew of a block's warps. Crews take neighbouring splits, the first crew the
// longest one; when that has been taken, they go on to the next ones.
struct RunSteps {
  int split, end_split;  // split: the first crew's
  int32_t within;        // positions of the split that have been taken
  int32_t split_tokens, end;

  __device__ int32_t position(int crew) const { return (split + crew) * split_tokens + within; }

  // Whether the crew has positions to take in this step.
  __device__ bool has(int crew) const { return split + crew < end_split && position(crew) < end; }

  __device__ void advance(int32_t tokens, int crews) {
    within += tokens;
    if (within < split_tokens && position(0) < end) return;
    within = 0;
    split += crews;
  }

  __device__ bool is_done() const { return split >= end_split; }
};

// A block's runs one after the other: splits [split, end_split) of a team. All threads hold the same.
struct RunCursor {
  int index;            // of the line; at grid.lines there are no more runs
  unsigned team;        // of the line
  unsigned team_begin;  // where the share's count of units or teams comes to it
  Line line;
  int32_t length;  // of the past
  LineCut cut;
  int split, end_split;

  // The share's first run, or the one that a block of the team's cluster has; all blocks know the team then, even those without splits.
  __device__ void seek(const SplitGrid& grid, const Share& share) {
    if (share.in_clusters) return seek_cluster(grid);
    team_begin = 0;
    seek_line(grid, share);
    if (index >= grid.lines) return;
    open_line(grid);
    team = share.begin - team_begin;
    split = 0;
    if (share.of_teams) {
      team_begin = share.begin;
    } else {
      const unsigned within = team;
      team = within / cut.units;
      team_begin += team * cut.units;
      split = static_cast<int>(divide_up(share.begin - team_begin, cut.split_units));
    }
    close_run(share);
    if (split >= cut.splits) next(grid, share);
    if (split >= end_split) index = grid.lines;
  }

  __device__ void next(const SplitGrid& grid, const Share& share) {
    if (share.in_clusters) {
      index = grid.lines;
      return;
    }
    team_begin += share.size_of(cut.units);
    split = 0;
    if (++team == grid.line_teams) {
      team = 0;
      ++index;
      while (index < grid.lines && grid.past_length(index) == 0) ++index;
      if (index < grid.lines) open_line(grid);
    }
    if (team_begin >= share.end) index = grid.lines;
    close_run(share);
  }

  __device__ bool has_run(const SplitGrid& grid) const { return index < grid.lines && split < end_split; }
  __device__ int32_t begin_position() const { return split * cut.split_tokens(); }
  __device__ int32_t end_position() const { return min(length, end_split * cut.split_tokens()); }
  __device__ RunSteps steps() const { return {split, end_split, 0, cut.split_tokens(), end_position()}; }

  // -1: the new position is not in the past.
  __device__ int32_t new_position() const { return line.position >= 0 && line.position < length ? line.position : -1; }

  // How many blocks have runs of the team.
  __device__ int runs(const Share& share) const {
    if (share.of_teams) return 1;
    if (cut.split_units > share.each) return cut.splits;
    const unsigned last = team_begin + (cut.splits - 1) * cut.split_units;
    return static_cast<int>(last / share.each - team_begin / share.each) + 1;
  }

 private:
  __device__ void seek_cluster(const SplitGrid& grid) {
    const unsigned cluster = blockIdx.x >> grid.rank_bits;
    const int rank = static_cast<int>(cluster_rank());
    index = static_cast<int>(cluster / grid.line_teams);
    team = cluster % grid.line_teams;
    team_begin = 0;
    split = end_split = 0;
    if (index >= grid.lines) return;
    open_line(grid);
    split = cut.split_of(grid, rank);
    end_split = cut.split_of(grid, rank + 1);
  }

  // The line in which the share begins, and that line's first unit. By the whole warp.
  __device__ void seek_line(const SplitGrid& grid, const Share& share) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int from = 0; from < grid.lines; from += kWarpSize) {
      const unsigned units = from + lane < grid.lines ? divide_up(grid.past_length(from + lane), kSplitUnit) : 0;
      const unsigned size = share.size_of(units) * grid.line_teams;
      unsigned end = size;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const unsigned before = __shfl_up_sync(kFullWarp, end, offset);
        if (lane >= offset) end += before;
      }
      const unsigned beyond = __ballot_sync(kFullWarp, team_begin + end > share.begin);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        index = from + found;
        team_begin += __shfl_sync(kFullWarp, end - size, found);
        return;
      }
      team_begin += __shfl_sync(kFullWarp, end, kWarpSize - 1);
    }
    index = grid.lines;
  }

  __device__ void open_line(const SplitGrid& grid) {
    line = load_line(grid.decode_meta, index);
    length = grid.cache.past_length(line);
    cut = LineCut::of(grid, length);
  }

  __device__ void close_run(const Share& share) {
    const unsigned left = share.end - min(team_begin, share.end);
    end_split = left > 0 ? cut.splits : 0;
    if (!share.of_teams) end_split = min(end_split, static_cast<int>(divide_up(left, cut.split_units)));
  }
};

// The query heads of a team.
struct TeamHeads {
  int kv_head, first, count;  // first: of the line's query heads

  __device__ static TeamHeads of(const SplitGrid& grid, unsigned team, int tile_queries) {
    TeamHeads heads;
    heads.kv_head = static_cast<int>(grid.tiles.divides(team));
    const int in_group = static_cast<int>(team - heads.kv_head * grid.tiles.of) * tile_queries;
    heads.first = heads.kv_head * grid.group + in_group;
    heads.count = min(grid.group - in_group, tile_queries);
    return heads;
  }

  // Whether it is the KV head's first team.
  __device__ bool leads(const SplitGrid& grid) const { return first == kv_head * grid.group; }
};

}  // namespace photon::cuda
