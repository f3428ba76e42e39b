// A one-warp CTA of split attention on its way through its tile ranges: when tiles are requested,
// scored and added, and where the sums go. `Sums` is the arithmetic: warp_sums.cuh keeps the order
// of summation of split_attention.cuh, batch_sums.cuh has one of its own.
#pragma once
#include "cuda/attention/warp_tiles.cuh"

namespace photon::cuda {

// What becomes of a one-warp CTA's sums: a tile range of the whole split-KV group is its result;
// the splits of others meet in the workspace, where the last warp to arrive merges them.

// Where the sums of one tile range go, in the layout that `Sums` has them in.
template <typename Sums>
class WarpResults {
 public:
  static constexpr int kHeadDim = Sums::kDims;
  using Shared = WarpShared<kHeadDim>;

  // is_live: else the token is zeros.
  __device__ WarpResults(const SplitGrid& grid, const Partials& partials, const RangeCursor& range,
                         bool is_live, Shared& shared)
      : grid_(grid),
        partials_(partials),
        range_(range),
        heads_(SplitGroupHeads::of(grid, range.split_group, kHalfQueries)),
        is_live_(is_live),
        shared_(shared) {}

  // The split-KV group's result.
  __device__ void write(const Sums& sums) const {
    sums.write(heads_.count, is_live_, [&](int query, int dim) { return out(query, dim); });
  }

  // Makes the sums of a split those of all splits so far. It and keep() are for sums by splits.
  __device__ void add_to_kept(Sums& sums) const {
    const LaneId lane = lane_id();
    if (lane.g >= heads_.count) return;
    Sums kept;
    kept.part.weight = shared_.weights[lane.g];
#pragma unroll
    for (int piece = 0; piece < Sums::kPieces; ++piece) {
      const float2 pair =
          *reinterpret_cast<const float2*>(&shared_.sums[lane.g][piece * 8 + 2 * lane.t]);
      kept.part.sum[2 * piece] = pair.x;
      kept.part.sum[2 * piece + 1] = pair.y;
    }
    kept.part.add(sums.part);
    sums = kept;
  }

  // Keeps the sums of the splits so far.
  __device__ void keep(const Sums& sums) const {
    __syncwarp();
    sums.leave(
        heads_.count, [&](int query) { return shared_.sums[query]; },
        [&](int query) { return &shared_.weights[query]; });
    __syncwarp();
  }

  // Leaves one split's result for the warp that merges.
  __device__ void leave(const Sums& sums, int split) const {
    sums.leave(
        heads_.count,
        [&](int query) { return partials_.sums + partial_at(query, split) * kHeadDim; },
        [&](int query) { return &partials_.weights[partial_at(query, split)]; });
  }

  // Whether this warp is the last of its split-KV group to arrive. If so, it sees what all of them
  // have left.
  __device__ bool is_last_to_arrive(int blocks) const {
    const unsigned last = static_cast<unsigned>(blocks) - 1;
    unsigned before = 0;
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      before = count_round(
          partials_.arrived + range_.index * grid_.token_split_groups.of + range_.split_group,
          last);
    }
    return __shfl_sync(kFullWarp, before, 0) == last;
  }

  // Merges the splits in order, a pair of dims a lane.
  __device__ void merge() const {
    constexpr int kPairs = kHeadDim / 2;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < heads_.count * kPairs; i += kWarpSize) {
      const int query = i / kPairs, dim = i % kPairs * 2;
      PartSoftmax<2> total = left(query, 0, dim);
#pragma unroll 1
      for (int from = 1; from < range_.cut.splits; from += kAtOnce) {
        PartSoftmax<2> parts[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          parts[j] = left(query, min(from + j, range_.cut.splits - 1), dim);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (from + j < range_.cut.splits) total.add(parts[j]);
        }
      }
      const float share = share_of(total.weight);
      const uint32_t pair = pack_bf16(share * total.sum[0], share * total.sum[1]);
      *out(query, dim) = is_live_ ? pair : 0;
    }
  }

 private:
  static constexpr int kAtOnce = 7;  // splits in flight, behind the first one

  __device__ int64_t partial_at(int query, int split) const {
    const int64_t head = static_cast<int64_t>(range_.index) * grid_.q_heads + heads_.first + query;
    return head * grid_.splits.of + split;
  }

  __device__ uint32_t* out(int query, int dim) const {
    return reinterpret_cast<uint32_t*>(grid_.out.at(range_.index, heads_.first + query) + dim);
  }

  __device__ PartSoftmax<2> left(int query, int split, int dim) const {
    const int64_t at = partial_at(query, split);
    const float2 sums = *reinterpret_cast<const float2*>(partials_.sums + at * kHeadDim + dim);
    return {partials_.weights[at], {sums.x, sums.y}};
  }

  const SplitGrid& grid_;
  const Partials& partials_;
  const RangeCursor& range_;
  const SplitGroupHeads heads_;
  const bool is_live_;
  Shared& shared_;
};

template <typename Sums>
class OneWarpCta {
 public:
  static constexpr int kHeadDim = Sums::kDims;
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  __device__ OneWarpCta(const RopeParams& rope, float scale, const SplitGrid& grid,
                        const Partials& partials, const CtaRanges<true>& ranges,
                        TileLoader<kHeadDim>& loader, Shared& shared)
      : rope_(rope),
        scale_log2_(scale * kLog2E),
        grid_(grid),
        partials_(partials),
        ranges_(ranges),
        loader_(loader),
        shared_(shared) {}

  // One tile range after the other.
  __device__ void attend() {
    start_copies();
#pragma unroll 1
    for (int number = 0;; ++number) {
      const RangeCursor& range = shared_.ranges[number % Shared::kRanges];
      if (!range.has_range(grid_)) break;
      attend_range(range);
      __syncwarp();  // all lanes are done with the tile range and with what has been kept
    }
  }

 private:
  static constexpr int kAtOnce = Sums::kTilesAtOnce;
  static constexpr uint32_t kAllAtOnce = (1u << kAtOnce) - 1;

  __device__ void start_copies() {
    loader_.advance();
    loader_.template request_keys<Shape::kTiles>(0);
  }

  __device__ void attend_range(const RangeCursor& range) {
    const bool is_live = queries_.prepare(rope_, grid_, range, shared_);
    const int warps = ranges_.ranges_of(range);
    new_position_ = range.new_position();
    steps_ = range.steps(grid_);
    sums_.clear();
    const WarpResults<Sums> results(grid_, partials_, range, is_live, shared_);
#pragma unroll 1
    do {
      attend_step();
      const int split = steps_.split;
      if (!steps_.advance(Shape::kStepTokens)) continue;
      if (warps > 1) {
        results.leave(sums_, split);
        sums_.clear();
      } else if constexpr (Sums::kBySplits) {
        if (split != range.split) results.add_to_kept(sums_);
        if (!steps_.is_done()) {
          results.keep(sums_);
          sums_.clear();
        }
      }
    } while (!steps_.is_done());
    if (warps == 1) {
      results.write(sums_);
    } else if (results.is_last_to_arrive(warps)) {
      results.merge();
    }
  }

  // When keys have been used, the values of the same positions are requested in their place; and
  // then the keys of the next step, perhaps of another tile range, in the place of values.
  __device__ void attend_step() {
    const uint32_t loaded = loader_.loaded();
    typename Sums::Step step;
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; tile += kAtOnce) {
      score_tiles(step, tile, loaded >> tile & kAllAtOnce);
      __syncwarp();  // all lanes have read the keys
      loader_.template request_values<kAtOnce>(tile);
    }
    loader_.advance();
    if (loader_.is_done()) let_next_start();
    sums_.begin_step(step);
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; tile += kAtOnce) {
#pragma unroll
      for (int other = tile; other < tile + kAtOnce; ++other) {
        if ((loaded >> other & 1) != 0) add_tile(step, other);
      }
      __syncwarp();  // all lanes have read the values
      loader_.template request_keys<kAtOnce>(tile);
    }
  }

  // `loaded`: a bit for each of kAtOnce tiles. The others are left out.
  __device__ void score_tiles(typename Sums::Step& step, int first, uint32_t loaded) {
    if (loaded == kAllAtOnce) {
#pragma unroll
      for (int tile = first; tile < first + kAtOnce; ++tile) await_keys(tile);
      step.template score<kAtOnce>(first, queries_, shared_.tiles[first], tokens_from(first),
                                   scale_log2_);
      return;
    }
#pragma unroll
    for (int tile = first; tile < first + kAtOnce; ++tile) {
      if (kAtOnce > 1 && (loaded >> (tile - first) & 1) != 0) {
        await_keys(tile);
        step.template score<1>(tile, queries_, shared_.tiles[tile], tokens_from(tile), scale_log2_);
      } else {
        step.leave_out(tile);
      }
    }
  }

  __device__ void await_keys(int tile) {
    wait_barrier(&shared_.full[tile], 0);
    if (has_new(tile)) {
      put_row<kHeadDim>(shared_.tiles[tile], new_token(tile), shared_.new_k);
      fence_async_shared();
      __syncwarp();
    }
  }

  __device__ void add_tile(const typename Sums::Step& step, int tile) {
    unsigned char* const values = shared_.tiles[tile];
    const int32_t tokens = tokens_from(tile);
    wait_barrier(&shared_.full[tile], 1);
    if (tokens < kTileTokens || has_new(tile)) {
      clear_rows<kHeadDim>(values, min(tokens, kTileTokens));
      if (has_new(tile)) put_row<kHeadDim>(values, new_token(tile), shared_.new_v);
      fence_async_shared();
      __syncwarp();
    }
    sums_.add_tile(step, tile, values);
  }

  // How many positions of the tile range there are from a tile of the step on, where in the tile
  // the new one is, and whether it is.
  __device__ int32_t tokens_from(int tile) const {
    return steps_.end - (steps_.at + tile * kTileTokens);
  }
  __device__ unsigned new_token(int tile) const {
    return new_position_ - (steps_.at + tile * kTileTokens);
  }
  __device__ bool has_new(int tile) const { return new_token(tile) < kTileTokens; }

  const RopeParams& rope_;
  const float scale_log2_;
  const SplitGrid& grid_;
  const Partials& partials_;
  const CtaRanges<true>& ranges_;
  TileLoader<kHeadDim>& loader_;
  Shared& shared_;
  typename Sums::Queries queries_ = {};
  Sums sums_;
  RangeSteps steps_ = {};
  int32_t new_position_ = -1;
};

}  // namespace photon::cuda
