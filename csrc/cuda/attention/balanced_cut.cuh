// How balanced_plan_kernel cuts the work of a step: where in the line of all KV tiles each CTA
// begins (balanced_ranges.cuh); or, of few query tiles, one partial tile for each CTA.
#pragma once
#include <climits>

#include "cuda/attention/balanced_query_tiles.cuh"
#include "cuda/attention/balanced_ranges.cuh"

namespace photon::cuda {

// A single partial tile for each CTA, at most. A lane of a warp has one query tile, and knows how
// that is cut.
//
// Few and short query tiles are done sooner so: whatever is cut has to be left in memory and added
// up, and that takes as long as several KV tiles.
class SinglePartials {
 public:
  static constexpr int kLeastKvTiles = 4;  // that a partial tile may have at most: with fewer there
                                           // would be more of them, which take longer to add up
  static constexpr int kMergeCost = 4;     // KV tiles that leaving and adding up takes as long as

  // All lanes must call it, and of_cta().
  __device__ SinglePartials(const QueryTiles& query_tiles, int kv_heads, int ctas)
      : query_tiles_(query_tiles),
        kv_heads_(kv_heads),
        kv_tiles_(lane_kv_tiles()),
        most_(find_most(ctas / kv_heads)) {
    if (most_ == INT_MAX) return;
    const int at_most = max((kv_tiles_ + most_ - 1) / most_, 1);
    length_ = max((kv_tiles_ + at_most - 1) / at_most, 1);
    partials_ = (kv_tiles_ + length_ - 1) / length_;
    upto_ = warp_sum_upto(partials_);
  }

  // The most KV tiles that one has; INT_MAX: there are more query tiles than CTAs of a KV head, or
  // than a warp has lanes.
  __device__ int most() const { return most_; }

  // That of the lane's CTA, where most() is not INT_MAX.
  __device__ PartialTile of_cta(int cta) const {
    const int of_head = __shfl_sync(kFullWarp, upto_, kWarpSize - 1), place = cta % max(of_head, 1);
    int query_tile = 0;
    for (int i = 0; i < query_tiles_.count; ++i)
      query_tile += __shfl_sync(kFullWarp, upto_, i) <= place;
    const int first = __shfl_sync(kFullWarp, upto_ - partials_, query_tile),
              kv_tiles = __shfl_sync(kFullWarp, kv_tiles_, query_tile),
              length = __shfl_sync(kFullWarp, length_, query_tile),
              begin = (place - first) * length;
    if (cta >= of_head * kv_heads_) return {};
    const QueryTile& tile = query_tiles_.tiles[query_tile];
    return {tile.first_token(),
            tile.count(),
            cta / of_head,
            begin,
            min(begin + length, kv_tiles),
            cta - begin / length,
            (kv_tiles + length - 1) / length,
            tile.lengths};
  }

 private:
  // Of the query tile of this lane; 0: there is none.
  __device__ int lane_kv_tiles() const {
    const int query_tile = static_cast<int>(threadIdx.x) % kWarpSize;
    if (query_tile >= query_tiles_.count) return 0;
    const QueryTile& tile = query_tiles_.tiles[query_tile];
    return tile.upto - tile.before - kPartialCost;
  }

  // `slots`: CTAs of a KV head.
  __device__ int find_most(int slots) const {
    if (query_tiles_.count > min(slots, kWarpSize)) return INT_MAX;
    int low = kLeastKvTiles - 1,
        high = max(warp_most(kv_tiles_), kLeastKvTiles);  // enough is high, not low
    while (high - low > 1) {
      const int middle = (low + high) / 2,
                partials = __reduce_add_sync(kFullWarp, (kv_tiles_ + middle - 1) / middle);
      (partials <= slots ? high : low) = middle;
    }
    return high;
  }

  const QueryTiles& query_tiles_;
  int kv_heads_, kv_tiles_, most_;
  int length_ = 0;               // of the query tile's partial tiles, but for the last
  int partials_ = 0, upto_ = 0;  // of the query tile; of those up to it
};

// What the CTAs of a step do. Where a single partial tile for each is no longer than its range of
// the line, it has this one instead.
class WorkCut {
 public:
  // All lanes of a warp must call it, and of_cta().
  __device__ WorkCut(const QueryTiles& query_tiles, int kv_heads, int ctas)
      : query_tiles_(query_tiles),
        kv_heads_(kv_heads),
        all_(query_tiles.places * kv_heads),
        size_(max((all_ + ctas - 1) / ctas, kLeastRange)),
        singles_(query_tiles, kv_heads, ctas) {}

  // That of the lane's CTA.
  __device__ CtaPlan of_cta(int cta) const {
    if (singles_.most() <= size_ - kPartialCost + SinglePartials::kMergeCost)
      return {singles_.of_cta(cta), {}};
    CtaRange range(query_tiles_.tiles, kv_heads_, range_of(cta));
    CtaPlan plan = {};
    range.next(plan.first);
    plan.rest = range.rest();
    return plan;
  }

 private:
  static constexpr int kLeastRange = 1 + kPartialCost;  // one KV tile of one query tile

  __device__ LineRange range_of(int cta) const {
    const int at = min(cta * size_, all_);
    int low = 0, high = max(query_tiles_.count, 1);  // the query tile is one of [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (query_tiles_.tiles[middle].before * kv_heads_ <= at ? low : high) = middle;
    }
    return {size_, at, min(at + size_, all_), low};
  }

  const QueryTiles& query_tiles_;
  int kv_heads_;
  int all_, size_;  // KV tiles of the line, and of a CTA's range
  SinglePartials singles_;
};

}  // namespace photon::cuda
