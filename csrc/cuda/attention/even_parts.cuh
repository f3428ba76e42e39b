// How balanced attention (even_attention) deals the work of a step to CTAs.
#pragma once
#include <climits>
#include <cstdint>

#include "cuda/attention/even_items.cuh"

namespace photon::cuda {

// A CTA's part of an item, for one KV head: units [begin, end) of `units`, of which CTAs
// `first_cta` and those that follow have one of `count` parts each.
struct Part {
  int first_token, tokens, kv_head, units, begin, end, first_cta, count;

  __device__ bool is_whole() const { return begin == 0 && end == units; }
};

// Where each CTA takes one part at most: the units of a part, and this CTA's.
//
// Few and short items are done sooner so: whatever is cut has to be left in memory and added up,
// and that takes as long as several units.
struct SinglePart {
  int item, kv_head;
  int length;      // of the item's parts, but for the last; 0: this CTA has none
  int begin, end;  // units

  static constexpr int kLeastUnits = 4;  // that a part may have at most: with fewer there would be
                                         // more parts, which take longer to add up
  static constexpr int kMergeCost = 4;   // units that leaving and adding up takes as long as

  // The most units that a part may have; INT_MAX: there are more items than CTAs of a KV head,
  // `slots`, or than a warp has lanes. All lanes must call it.
  static __device__ int most_units(const Items& items, int slots) {
    if (items.count > min(slots, kWarpSize)) return INT_MAX;
    const int units = lane_units(items);
    int low = kLeastUnits - 1,
        high = max(warp_most(units), kLeastUnits);  // enough is high, not low
    while (high - low > 1) {
      const int middle = (low + high) / 2,
                parts = __reduce_add_sync(kFullWarp, (units + middle - 1) / middle);
      (parts <= slots ? high : low) = middle;
    }
    return high;
  }

  // That of a CTA. All lanes must call it.
  static __device__ SinglePart of_cta(const Items& items, int kv_heads, int cta, int most) {
    const int units = lane_units(items), at_most = max((units + most - 1) / most, 1),
              length = max((units + at_most - 1) / at_most, 1),
              parts = (units + length - 1) / length, upto = warp_sum_upto(parts),
              of_head = __shfl_sync(kFullWarp, upto, kWarpSize - 1);
    if (of_head == 0 || cta >= of_head * kv_heads) return {};
    const int place = cta % of_head, item = __popc(__ballot_sync(kFullWarp, upto <= place)),
              first = __shfl_sync(kFullWarp, upto - parts, item),
              own_units = __shfl_sync(kFullWarp, units, item),
              own_length = __shfl_sync(kFullWarp, length, item),
              begin = (place - first) * own_length;
    return {item, cta / of_head, own_length, begin, min(begin + own_length, own_units)};
  }

 private:
  // Of the item of this lane; 0: there is none.
  static __device__ int lane_units(const Items& items) {
    const int item = static_cast<int>(threadIdx.x) % kWarpSize;
    return item < items.count ? items.before[item + 1] - items.before[item] - kPartCost : 0;
  }
};

// Goes through a CTA's share, part by part. All units of a step stand in a line, item after item
// and head after head, and each CTA takes an equal share of them, one after the other; so it has at
// most two parts of contexts that it shares with others: the first and the last. Where a single
// part for each CTA is no longer than that, it has this one instead.
class Share {
 public:
  // All lanes of a warp must call it.
  __device__ Share(const Items& items, int kv_heads, int cta, int ctas)
      : items_(items), kv_heads_(kv_heads) {
    const int all = items.before[items.count] * kv_heads;
    size_ = max((all + ctas - 1) / ctas, kLeastShare);
    const int most = SinglePart::most_units(items, ctas / kv_heads);
    if (most <= size_ - kPartCost + SinglePart::kMergeCost) {
      const SinglePart own = SinglePart::of_cta(items, kv_heads, cta, most);
      item_ = own.item, kv_head_ = own.kv_head, length_ = own.length;
      at_ = own.begin, end_ = own.end;
      return;
    }
    at_ = min(cta * size_, all);
    end_ = min(at_ + size_, all);
    int low = 0, high = max(items.count, 1);  // the item is one of [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (items.before[middle] * kv_heads <= at_ ? low : high) = middle;
    }
    item_ = low;
  }

  // Moves to the next part; false: there is none.
  __device__ bool next(Part& part) {
    if (length_ > 0) return take_single(part);
    while (at_ < end_) {
      while (items_.before[item_ + 1] * kv_heads_ <= at_) ++item_;
      const int before = items_.before[item_], all = items_.before[item_ + 1] - before,
                from = at_ - before * kv_heads_, head = from / all, own = from - head * all,
                end = min(all, own + end_ - at_), first = at_ - own,
                first_cta = (first + kPartCost) / size_;
      at_ += end - own;
      if (end <= kPartCost) continue;
      part = {items_.tokens[item_] % Items::kOneToken,
              items_.tokens[item_] / Items::kOneToken,
              head,
              all - kPartCost,
              max(own - kPartCost, 0),
              end - kPartCost,
              first_cta,
              (first + all - 1) / size_ - first_cta + 1};
      return true;
    }
    return false;
  }

 private:
  static constexpr int kLeastShare = 1 + kPartCost;  // one part of one tile

  __device__ bool take_single(Part& part) {
    if (at_ == end_) return false;
    const int units = items_.before[item_ + 1] - items_.before[item_] - kPartCost;
    part = {items_.tokens[item_] % Items::kOneToken,
            items_.tokens[item_] / Items::kOneToken,
            kv_head_,
            units,
            at_,
            end_,
            static_cast<int>(blockIdx.x) - at_ / length_,
            (units + length_ - 1) / length_};
    at_ = end_;
    return true;
  }

  const Items& items_;
  int kv_heads_, size_;   // a share of the line, in units
  int at_ = 0, end_ = 0;  // of the line, or, of a single part, of its item
  int item_ = 0;
  int kv_head_ = 0, length_ = 0;  // of a single part; length 0: there is none
};

// The row of a part's tokens, and the smallest and the largest of their lengths.
struct Lengths {
  int32_t row, least, most;
};

// All lanes of a warp must call it, and all get the same.
__device__ inline Lengths load_lengths(const StepTokens& tokens, const Part& part) {
  Lengths lengths = {tokens.context(part.first_token).row, INT_MAX, 0};
#pragma unroll
  for (int i = 0; i < kTileRows; i += kWarpSize) {
    const int own = i + static_cast<int>(threadIdx.x) % kWarpSize,
              token = part.first_token + min(own, part.tokens - 1);  // or the last one once more
    const int32_t length = tokens.context(token).length;
    lengths.least = min(lengths.least, length);
    lengths.most = max(lengths.most, length);
  }
  lengths.least = warp_least(lengths.least);
  lengths.most = warp_most(lengths.most);
  return lengths;
}

}  // namespace photon::cuda
