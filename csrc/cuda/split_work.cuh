// Which splits of which lines a block of split attention takes. All teams' pasts, laid end to end in units of one step of a block, are cut
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

constexpr int kCrewTokens = 64;  // positions that a crew of warps takes in a step

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
  Divisor line_teams;         // teams of a line
  Divisor tiles;              // teams of a KV head
  Divisor splits;             // of a long past
  Divisor blocks;             // of the launch
  Divisor rank_pieces;        // of a query's sums, that a rank merges at most (split_meeting.cuh)
  int rank_bits;              // log2 of a cluster's blocks
  int unit_bits;              // log2 of a unit's positions
  SplitCache cache;
  LineHeads<const Bf16> q, k, v;
  LineHeads<Bf16> out;

  __device__ int ranks() const { return 1 << rank_bits; }
  // What falls to a rank, of so many things, at most.
  __device__ int each_rank(int things) const { return (things + ranks() - 1) >> rank_bits; }

  __device__ unsigned units_of(int32_t length) const { return (static_cast<unsigned>(length) + (1u << unit_bits) - 1) >> unit_bits; }

  // Positions that a line attends to, if it is live.
  __device__ int32_t past_length(int line) const { return cache.past_length(load_line(decode_meta, line)); }
};

// How a line's past is cut.
struct LineCut {
  unsigned units = 0, split_units = 1;  // of the past, and of every split but the last
  int splits = 0;

  __device__ static LineCut of(const SplitGrid& grid, int32_t length) {
    const bool is_few = length <= kFewTokens;
    LineCut cut;
    cut.units = grid.units_of(length);
    cut.split_units = max(is_few ? (cut.units + kFewSplits - 1) / kFewSplits : grid.splits.divides(cut.units + grid.splits.of - 1), 1u);
    cut.splits = cut.splits_of(cut.units);
    return cut;
  }

  // Splits that begin in so many of its first units. A division takes a hundred clocks, and up to a few units to the split a multiplication
  // does: there are 4 * kMaxSplits of them at most then, and a third is rounded up by less than 2^-16.
  __device__ int splits_of(unsigned some) const {
    constexpr unsigned kBits = 16, kThird = ((1u << kBits) + 2) / 3;
    const unsigned above = some + split_units - 1;
    if (split_units > 4) return static_cast<int>(above / split_units);
    return static_cast<int>(above * (split_units == 3 ? kThird : 1u << kBits >> split_units / 2) >> kBits);
  }

  // That of a lane of the warp.
  __device__ LineCut of_lane(int lane) const {
    LineCut cut;
    cut.units = __shfl_sync(kFullWarp, units, lane);
    cut.split_units = __shfl_sync(kFullWarp, split_units, lane);
    cut.splits = __shfl_sync(kFullWarp, splits, lane);
    return cut;
  }

  __device__ int32_t split_tokens(const SplitGrid& grid) const { return static_cast<int32_t>(split_units << grid.unit_bits); }

  // The first split of a rank of a cluster that has all of them.
  __device__ int split_of(const SplitGrid& grid, int rank) const { return splits * rank >> grid.rank_bits; }

  // What the busiest rank has to do, in units.
  __device__ unsigned rank_units(const SplitGrid& grid) const { return grid.each_rank(splits) * split_units; }
};

// A block's part of the work of all teams: of their units, or where that is about as even, of the teams as a whole, so that no team's
// splits have to meet.
struct Share {
  // So many positions more may a block of a cluster take, or one with whole teams, because it saves the meeting in global memory.
  static constexpr unsigned kClusterTokens = 256, kTeamTokens = 128;

  unsigned each, begin, end;  // in units; or in teams
  bool in_clusters;           // a cluster has a team
  bool of_teams;              // a team is one block's
  bool has_dead;              // there are lines that attend to nothing

  // All warps compute the same, and all blocks. `own`, which comes empty: where lines are no more than lanes, of each lane the cut of
  // its line.
  __device__ static Share of_block(const SplitGrid& grid, LineCut& own) {
    unsigned units = 0, live = 0, rank_units = 0, longest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < grid.lines; i += kWarpSize) {
      const int32_t length = grid.past_length(i);
      own = LineCut::of(grid, length);
      units += own.units;
      live += own.units > 0 ? 1 : 0;
      longest = max(longest, own.units);
      // A longer past may have more splits than a block of a cluster has room for (MeetingMemory).
      rank_units = max(rank_units, length <= kFewTokens ? own.rank_units(grid) : INT32_MAX);
    }
    live = __reduce_add_sync(kFullWarp, live);
    const unsigned each_units = divide_each(grid, __reduce_add_sync(kFullWarp, units) * grid.line_teams.of);
    const unsigned each_teams = divide_each(grid, live * grid.line_teams.of);
    const bool in_clusters =
        grid.rank_bits > 0 && __reduce_max_sync(kFullWarp, rank_units) <= each_units + (kClusterTokens >> grid.unit_bits);
    const bool of_teams = uint64_t{__reduce_max_sync(kFullWarp, longest)} * each_teams <= each_units + (kTeamTokens >> grid.unit_bits);
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

// The way through a run, in steps of so many positions; a split is whole steps.
struct RunSteps {
  int split;
  int32_t split_end, split_tokens;
  int32_t at, end;  // positions: of the step, and where the run ends

  // Whether a split has been taken by this step.
  __device__ bool advance(int32_t tokens) {
    at += tokens;
    if (at < split_end && at < end) return false;
    ++split;
    split_end += split_tokens;
    return true;
  }

  __device__ bool is_done() const { return at >= end; }
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
  // `own`: as in Share::of_block().
  __device__ void seek(const SplitGrid& grid, const Share& share, const LineCut& own) {
    if (share.in_clusters) return seek_cluster(grid, own);
    team_begin = 0;
    seek_line(grid, share, own);
    if (index >= grid.lines) return;
    open_first_line(grid, own);
    team = share.begin - team_begin;
    split = 0;
    if (share.of_teams) {
      team_begin = share.begin;
    } else {
      const unsigned within = team;
      team = within / cut.units;
      team_begin += team * cut.units;
      split = cut.splits_of(share.begin - team_begin);
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
    if (++team == grid.line_teams.of) {
      team = 0;
      ++index;
      while (index < grid.lines && grid.past_length(index) == 0) ++index;
      if (index < grid.lines) open_line(grid);
    }
    if (team_begin >= share.end) index = grid.lines;
    close_run(share);
  }

  __device__ bool has_run(const SplitGrid& grid) const { return index < grid.lines && split < end_split; }
  __device__ int32_t begin_position(const SplitGrid& grid) const { return split * cut.split_tokens(grid); }
  __device__ int32_t end_position(const SplitGrid& grid) const { return min(length, end_split * cut.split_tokens(grid)); }
  __device__ RunSteps steps(const SplitGrid& grid) const {
    const int32_t begin = begin_position(grid), tokens = cut.split_tokens(grid);
    return {split, begin + tokens, tokens, begin, end_position(grid)};
  }

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
  __device__ void seek_cluster(const SplitGrid& grid, const LineCut& own) {
    const unsigned cluster = blockIdx.x >> grid.rank_bits;
    const int rank = static_cast<int>(cluster_rank());
    index = static_cast<int>(grid.line_teams.divides(cluster));
    team = cluster - index * grid.line_teams.of;
    team_begin = 0;
    split = end_split = 0;
    if (index >= grid.lines) return;
    open_first_line(grid, own);
    split = cut.split_of(grid, rank);
    end_split = cut.split_of(grid, rank + 1);
  }

  // The line in which the share begins, and that line's first unit, or team. By the whole warp.
  __device__ void seek_line(const SplitGrid& grid, const Share& share, const LineCut& own) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int from = 0; from < grid.lines; from += kWarpSize) {
      unsigned units = own.units;
      if (grid.lines > kWarpSize) units = from + lane < grid.lines ? grid.units_of(grid.past_length(from + lane)) : 0;
      const unsigned size = share.size_of(units) * grid.line_teams.of;
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

  // The same, of the line whose cut one of the lanes may have.
  __device__ void open_first_line(const SplitGrid& grid, const LineCut& own) {
    if (grid.lines > kWarpSize) return open_line(grid);
    line = load_line(grid.decode_meta, index);
    length = grid.cache.past_length(line);
    cut = own.of_lane(index);
  }

  __device__ void close_run(const Share& share) {
    const unsigned left = share.end - min(team_begin, share.end);
    end_split = left > 0 ? cut.splits : 0;
    if (!share.of_teams && left < cut.units) end_split = cut.splits_of(left);
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
