// What becomes of a lone warp's sums: a tile range of the whole split-KV group is its result; the
// splits of others meet in the workspace, where the last warp to arrive merges them.
#pragma once
#include "cuda/attention/warp_tiles.cuh"

namespace photon::cuda {

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

}  // namespace photon::cuda
