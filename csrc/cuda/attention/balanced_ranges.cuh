// How balanced attention (balanced_attention) deals the work of a step to CTAs.
#pragma once
#include <climits>
#include <cstdint>

#include "cuda/attention/balanced_query_tiles.cuh"

namespace photon::cuda {

// The part of a query tile, for one KV head, that one CTA computes: KV tiles [begin, end) of
// `kv_tiles`. CTA `first_cta` and those that follow have one of the query tile's `count` partial
// tiles each.
struct PartialTile {
  int first_token, tokens, kv_head, kv_tiles, begin, end, first_cta, count;

  __device__ bool is_whole() const { return begin == 0 && end == kv_tiles; }
};

// Where each CTA takes one partial tile at most: how many KV tiles one has, and this CTA's.
//
// Few and short query tiles are done sooner so: whatever is cut has to be left in memory and added
// up, and that takes as long as several KV tiles.
struct SinglePartial {
  int query_tile, kv_head;
  int length;      // of the query tile's partial tiles, but for the last; 0: none here
  int begin, end;  // KV tiles

  static constexpr int kLeastKvTiles = 4;  // that a partial tile may have at most: with fewer there
                                           // would be more of them, which take longer to add up
  static constexpr int kMergeCost = 4;     // KV tiles that leaving and adding up takes as long as

  // The most KV tiles that a partial tile may have; INT_MAX: there are more query tiles than CTAs
  // of a KV head, `slots`, or than a warp has lanes. All lanes must call it.
  static __device__ int most_kv_tiles(const QueryTiles& query_tiles, int slots) {
    if (query_tiles.count > min(slots, kWarpSize)) return INT_MAX;
    const int kv_tiles = lane_kv_tiles(query_tiles);
    int low = kLeastKvTiles - 1,
        high = max(warp_most(kv_tiles), kLeastKvTiles);  // enough is high, not low
    while (high - low > 1) {
      const int middle = (low + high) / 2,
                partials = __reduce_add_sync(kFullWarp, (kv_tiles + middle - 1) / middle);
      (partials <= slots ? high : low) = middle;
    }
    return high;
  }

  // That of a CTA. All lanes must call it.
  static __device__ SinglePartial of_cta(const QueryTiles& query_tiles, int kv_heads, int cta,
                                         int most) {
    const int kv_tiles = lane_kv_tiles(query_tiles), at_most = max((kv_tiles + most - 1) / most, 1),
              length = max((kv_tiles + at_most - 1) / at_most, 1),
              partials = (kv_tiles + length - 1) / length, upto = warp_sum_upto(partials),
              of_head = __shfl_sync(kFullWarp, upto, kWarpSize - 1);
    if (of_head == 0 || cta >= of_head * kv_heads) return {};
    const int place = cta % of_head, query_tile = __popc(__ballot_sync(kFullWarp, upto <= place)),
              first = __shfl_sync(kFullWarp, upto - partials, query_tile),
              own_kv_tiles = __shfl_sync(kFullWarp, kv_tiles, query_tile),
              own_length = __shfl_sync(kFullWarp, length, query_tile),
              begin = (place - first) * own_length;
    return {query_tile, cta / of_head, own_length, begin, min(begin + own_length, own_kv_tiles)};
  }

 private:
  // Of the query tile of this lane; 0: there is none.
  static __device__ int lane_kv_tiles(const QueryTiles& query_tiles) {
    const int query_tile = static_cast<int>(threadIdx.x) % kWarpSize;
    return query_tile < query_tiles.count
               ? query_tiles.before[query_tile + 1] - query_tiles.before[query_tile] - kPartialCost
               : 0;
  }
};

// Goes through a CTA's range, one partial tile after the other. All KV tiles of a step stand in a
// line, query tile after query tile and head after head, and each CTA takes an equal range of them.
// So it shares at most two query tiles with others: the first and the last. Where a single partial
// tile for each CTA is no longer than that, it has this one instead.
class CtaRange {
 public:
  // All lanes of a warp must call it.
  __device__ CtaRange(const QueryTiles& query_tiles, int kv_heads, int cta, int ctas)
      : query_tiles_(query_tiles), kv_heads_(kv_heads) {
    const int all = query_tiles.before[query_tiles.count] * kv_heads;
    size_ = max((all + ctas - 1) / ctas, kLeastRange);
    const int most = SinglePartial::most_kv_tiles(query_tiles, ctas / kv_heads);
    if (most <= size_ - kPartialCost + SinglePartial::kMergeCost) {
      const SinglePartial own = SinglePartial::of_cta(query_tiles, kv_heads, cta, most);
      query_tile_ = own.query_tile, kv_head_ = own.kv_head, length_ = own.length;
      at_ = own.begin, end_ = own.end;
      return;
    }
    at_ = min(cta * size_, all);
    end_ = min(at_ + size_, all);
    int low = 0, high = max(query_tiles.count, 1);  // the query tile is one of [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (query_tiles.before[middle] * kv_heads <= at_ ? low : high) = middle;
    }
    query_tile_ = low;
  }

  // Moves to the next partial tile; false: there is none.
  __device__ bool next(PartialTile& partial) {
    if (length_ > 0) return take_single(partial);
    while (at_ < end_) {
      while (query_tiles_.before[query_tile_ + 1] * kv_heads_ <= at_) ++query_tile_;
      const int before = query_tiles_.before[query_tile_],
                all = query_tiles_.before[query_tile_ + 1] - before,
                from = at_ - before * kv_heads_, head = from / all, own = from - head * all,
                end = min(all, own + end_ - at_), first = at_ - own,
                first_cta = (first + kPartialCost) / size_;
      at_ += end - own;
      if (end <= kPartialCost) continue;
      partial = {query_tiles_.tokens[query_tile_] % QueryTiles::kOneToken,
                 query_tiles_.tokens[query_tile_] / QueryTiles::kOneToken,
                 head,
                 all - kPartialCost,
                 max(own - kPartialCost, 0),
                 end - kPartialCost,
                 first_cta,
                 (first + all - 1) / size_ - first_cta + 1};
      return true;
    }
    return false;
  }

 private:
  static constexpr int kLeastRange = 1 + kPartialCost;  // one KV tile of one query tile

  __device__ bool take_single(PartialTile& partial) {
    if (at_ == end_) return false;
    const int kv_tiles =
        query_tiles_.before[query_tile_ + 1] - query_tiles_.before[query_tile_] - kPartialCost;
    partial = {query_tiles_.tokens[query_tile_] % QueryTiles::kOneToken,
               query_tiles_.tokens[query_tile_] / QueryTiles::kOneToken,
               kv_head_,
               kv_tiles,
               at_,
               end_,
               static_cast<int>(blockIdx.x) - at_ / length_,
               (kv_tiles + length_ - 1) / length_};
    at_ = end_;
    return true;
  }

  const QueryTiles& query_tiles_;
  int kv_heads_, size_;   // of a range, in KV tiles
  int at_ = 0, end_ = 0;  // of the line, or, of a single partial tile, of its query tile
  int query_tile_ = 0;
  int kv_head_ = 0, length_ = 0;  // of a single partial tile; length 0: there is none
};

// The row of a partial tile's tokens, and the smallest and the largest of their lengths.
struct Lengths {
  int32_t row, least, most;
};

// All lanes of a warp must call it, and all get the same.
__device__ inline Lengths load_lengths(const StepTokens& tokens, const PartialTile& partial) {
  Lengths lengths = {tokens.context(partial.first_token).row, INT_MAX, 0};
#pragma unroll
  for (int i = 0; i < kTileRows; i += kWarpSize) {
    const int own = i + static_cast<int>(threadIdx.x) % kWarpSize,
              token =
                  partial.first_token + min(own, partial.tokens - 1);  // or the last one once more
    const int32_t length = tokens.context(token).length;
    lengths.least = min(lengths.least, length);
    lengths.most = max(lengths.most, length);
  }
  lengths.least = warp_least(lengths.least);
  lengths.most = warp_most(lengths.most);
  return lengths;
}

}  // namespace photon::cuda
