// The distance up to which a filter keeps ids (common/filter.h), for any filter: searched 8 bits at
// a time, by sums over the cluster in 256 bins. The ids that are left after the first bits are
// listed, so that few read the logits again. All sums are of integers, and depend on no order and
// no launch.
#pragma once
#include "common/filter.h"
#include "common/noise.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sampling/row_reduce.cuh"
#include "cuda/sampling/scaled_row.cuh"

namespace photon::cuda {

constexpr int kFilterBinBits = 8;
constexpr int kFilterBins = 1 << kFilterBinBits;
constexpr int kFilterList = 2048;  // ids that a CTA can list; one with more reads its logits again

// An amount of 64 bits, as words for 32-bit atomics; read by the cluster as a float2.
struct alignas(8) FilterBin {
  uint32_t low, high;
};

// Where a search is: the bits of the distance that it has found so far.
struct FilterPlace {
  uint32_t prefix;
  int32_t found;  // the search is over: the ids of this prefix are kept, and none beyond
};

struct FilterSearch {
  FilterBin bins[2][kFilterBins];  // of this CTA; one is summed up while the other is cleared
  uint64_t totals[kFilterBins];    // of the cluster
  FilterPlace place;
  uint32_t listed;  // ids that belong on the list, perhaps more than fit
  int32_t ids[kFilterList];
  float scaled[kFilterList];
};

// What the ids that are near enough are looked at for.
enum class FilterLook {
  kCount,  // to sum up how many there are
  kMass,   // and what they weigh
  kList,
  kDraw,
};

// The largest distance whose bits from `shift` on are `prefix`.
__device__ inline uint32_t last_of(uint32_t prefix, int shift) {
  return static_cast<uint32_t>(((uint64_t{prefix} + 1) << shift) - 1);
}

__device__ inline void add_amount(FilterBin& bin, uint32_t amount) {
  const uint32_t before = atomicAdd(&bin.low, amount);
  if (before + amount < before) atomicAdd(&bin.high, 1u);
}

// The sum over the cluster of a bin.
template <int kBlocks>
__device__ uint64_t total_of(const FilterBin& bin) {
  if constexpr (kBlocks == 1) return uint64_t{bin.high} << 32 | bin.low;
  uint64_t total = 0;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float2 words = load_from_block(reinterpret_cast<const float2*>(&bin), block);
    total += uint64_t{__float_as_uint(words.y)} << 32 | __float_as_uint(words.x);
  }
  return total;
}

// The search in one row. All threads of the row's CTAs call every function.
template <typename AnyRow, int kBlocks>
struct RowSearch {
  static constexpr int kFirstShift = 32 - kFilterBinBits;

  const ScaledRow<AnyRow>& row;
  const Filter& filter;
  const Noise& noise;
  FilterSearch& shared;
  uint32_t limit = kFarthest;  // ids beyond this distance are dropped
  bool has_list = false;
  int buffer = 0;  // which bins are clear
  uint32_t prefix = 0;
  int shift = kFirstShift;
  uint64_t left = 0;  // of what is needed; the first warp's alone

  // The thread's best of the ids that the filter keeps. All looks run the same code: that of each
  // alone would take longer to fetch than to run.
  __device__ Candidate best() {
    start();
    FilterLook look = filter.counts() ? FilterLook::kCount : behind_count();
    FilterLook behind_list = look;
    Candidate best;
#pragma unroll 1
    while (true) {
      for_near([&](int32_t id, float scaled, uint32_t distance) {
        if (look == FilterLook::kList)
          put(id, scaled);
        else if (look == FilterLook::kDraw)
          draw(best, id, scaled, distance);
        else
          add(look, distance);
      });
      if (look == FilterLook::kDraw) return best;
      if (look == FilterLook::kList) {
        __syncthreads();
        has_list = true;
        look = behind_list;
      } else {
        behind_list = sum_up(look);
        look = has_list ? behind_list : FilterLook::kList;
      }
    }
  }

 private:
  __device__ void start() {
    __syncthreads();  // what shares its memory is read no more
    if (threadIdx.x == 0) shared.listed = 0;
    clear(0);
    __syncthreads();
  }

  __device__ void clear(int which) {
    for (int bin = threadIdx.x; bin < kFilterBins; bin += blockDim.x)
      shared.bins[which][bin] = {0, 0};
  }

  __device__ FilterLook behind_count() const {
    return filter.sums() ? FilterLook::kMass : FilterLook::kDraw;
  }

  // Calls body(id, scaled logit, distance) for those of the thread's ids that are near enough: from
  // the list, where there is one.
  template <typename Body>
  __device__ void for_near(const Body& body) const {
    if (!has_list || shared.listed > kFilterList) return row.for_near(limit, body);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < shared.listed; i += blockDim.x) {
      const float scaled = shared.scaled[i];
      const uint32_t distance = distance_below(row.top, scaled);
      if (distance <= limit) body(shared.ids[i], scaled, distance);
    }
  }

  __device__ void put(int32_t id, float scaled) const {
    const uint32_t at = atomicAdd(&shared.listed, 1u);
    if (at >= kFilterList) return;
    shared.ids[at] = id;
    shared.scaled[at] = scaled;
  }

  __device__ void draw(Candidate& best, int32_t id, float scaled, uint32_t distance) const {
    if (weight_at(distance) < filter.least_weight) return;
    const Candidate candidate = {noise.noised(scaled, id), id};
    if (is_better(candidate, best)) best = candidate;
  }

  __device__ static uint32_t amount(FilterLook look, uint32_t distance) {
    return look == FilterLook::kCount ? 1 : weight_at(distance);
  }

  __device__ uint64_t needed(FilterLook look, uint64_t total) const {
    return look == FilterLook::kCount ? filter.needed_count() : filter.needed_mass(total);
  }

  // Adds the amount of an id whose distance begins with the prefix, by the next bits.
  __device__ void add(FilterLook look, uint32_t distance) const {
    const uint32_t bin = distance >> shift;
    if (bin >> kFilterBinBits == prefix)
      add_amount(shared.bins[buffer][bin % kFilterBins], amount(look, distance));
  }

  // Finds, by the amounts that all have added, the next bits of the smallest distance up to which
  // they come to what is needed; where they do not, the limit stays. Returns what to look for next.
  __device__ FilterLook sum_up(FilterLook look) {
    sync_row<kBlocks>();  // what bins had before is read no more when a CTA gets past it
    FilterBin* bins = shared.bins[buffer];
    buffer ^= 1;
    clear(buffer);
    for (int bin = threadIdx.x; bin < kFilterBins; bin += blockDim.x)
      shared.totals[bin] = total_of<kBlocks>(bins[bin]);
    __syncthreads();
    if (threadIdx.x < kWarpSize) find_bin(look);
    __syncthreads();
    const FilterPlace place = shared.place;
    if (shift == kFirstShift || place.found != 0) limit = min(limit, last_of(place.prefix, shift));
    prefix = place.found != 0 ? 0 : place.prefix;
    shift = place.found != 0 ? kFirstShift : shift - kFilterBinBits;
    if (place.found == 0) return look;
    return look == FilterLook::kCount ? behind_count() : FilterLook::kDraw;
  }

  // The first warp: the bin in which the sum reaches what is left, into shared.place. The search
  // may end there: all of the bin is needed, or it holds one id. (Each weighs at least what the
  // last of the bin would.)
  __device__ void find_bin(FilterLook look) {
    constexpr int kOwn = kFilterBins / kWarpSize;
    const int lane = threadIdx.x;
    uint64_t own = 0;
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) own += shared.totals[lane * kOwn + i];
    uint64_t sum = own;  // of the lanes up to this one
#pragma unroll 1
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t below = __shfl_up_sync(kFullWarp, sum, offset);
      if (lane >= offset) sum += below;
    }
    const uint64_t total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    if (shift == kFirstShift) left = needed(look, total);
    const unsigned reached = __ballot_sync(kFullWarp, sum >= left);
    const int finder = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : kWarpSize - 1;
    uint64_t rest = left - (sum - own);  // the finder's: what its own bins have to give
    if (lane == finder) {
      int bin = lane * kOwn;
      for (; bin < lane * kOwn + kOwn - 1 && shared.totals[bin] < rest; ++bin)
        rest -= shared.totals[bin];
      const uint64_t in_bin = shared.totals[bin];
      const uint32_t found = prefix << kFilterBinBits | static_cast<uint32_t>(bin);
      const uint32_t last = last_of(found, shift);
      const bool done =
          reached == 0 || shift == 0 || in_bin == rest || in_bin < 2 * uint64_t{amount(look, last)};
      shared.place = {reached == 0 ? kFilterBins - 1u : found, done ? 1 : 0};
    }
    left = __shfl_sync(kFullWarp, rest, finder);
  }
};

}  // namespace photon::cuda
