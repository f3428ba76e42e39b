// The distance up to which a filter keeps ids (common/filter.h), for any filter: searched 8 bits at
// a time, by sums over the cluster in 256 bins. The ids that are left after the first bits are
// listed, so that few read the logits again. All sums are of integers, and depend on no order and
// no launch.
#pragma once
#include "common/filter.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_reduce.cuh"
#include "cuda/scaled_row.cuh"

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
  uint32_t distances[kFilterList];
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

// One row's filter at work. All threads of the row's CTAs call every function.
template <typename AnyRow, int kBlocks>
struct RowFilter {
  const ScaledRow<AnyRow>& row;
  FilterSearch& shared;
  uint32_t limit = kFarthest;  // ids beyond this distance are dropped
  bool has_list = false;
  int buffer = 0;  // which bins are clear

  // Calls body(id, distance) for those of the thread's ids that are near enough: from the list,
  // where there is one.
  template <typename Body>
  __device__ void for_near(const Body& body) const {
    if (!has_list || shared.listed > kFilterList)
      return row.for_near(limit, [&](int32_t id, float, uint32_t at) { body(id, at); });
    for (uint32_t i = threadIdx.x; i < shared.listed; i += blockDim.x)
      if (shared.distances[i] <= limit) body(shared.ids[i], shared.distances[i]);
  }

  __device__ void clear(int which) {
    for (int bin = threadIdx.x; bin < kFilterBins; bin += blockDim.x)
      shared.bins[which][bin] = {0, 0};
  }

  // Lists the ids that are near enough.
  __device__ void list() {
    for_near([&](int32_t id, uint32_t distance) {
      const uint32_t at = atomicAdd(&shared.listed, 1u);
      if (at >= kFilterList) return;
      shared.ids[at] = id;
      shared.distances[at] = distance;
    });
    __syncthreads();
    has_list = true;
  }

  // Sums up the amounts of ids whose distance begins with `prefix`, by the next bits. What the
  // bins had before is read no more when a CTA gets past the barrier.
  template <typename Amount>
  __device__ void sum_up(uint32_t prefix, int shift, const Amount& amount) {
    FilterBin* bins = shared.bins[buffer];
    for_near([&](int32_t, uint32_t distance) {
      const uint32_t bin = distance >> shift;
      if (bin >> kFilterBinBits == prefix) add_amount(bins[bin % kFilterBins], amount(distance));
    });
    sync_row<kBlocks>();
    buffer ^= 1;
    clear(buffer);
    for (int bin = threadIdx.x; bin < kFilterBins; bin += blockDim.x)
      shared.totals[bin] = total_of<kBlocks>(bins[bin]);
    __syncthreads();
  }

  // Lowers the limit to the smallest distance up to which the amounts come to needed(total of the
  // amounts); where they do not, it stays.
  template <typename Amount, typename Needed>
  __device__ void lower_limit(const Amount& amount, const Needed& needed) {
    uint64_t left = 0;  // of what is needed; the first warp's alone
    uint32_t prefix = 0;
    for (int shift = 32 - kFilterBinBits;; shift -= kFilterBinBits) {
      const bool first = shift == 32 - kFilterBinBits;
      sum_up(prefix, shift, amount);
      if (threadIdx.x < kWarpSize) find_bin(left, prefix, shift, first, amount, needed);
      __syncthreads();
      const FilterPlace place = shared.place;
      prefix = place.prefix;
      const uint32_t last = last_of(prefix, shift);
      if (first || place.found != 0) limit = min(limit, last);
      if (first && !has_list) list();
      if (place.found != 0) return;
    }
  }

  // The first warp: the bin in which the sum reaches what is left, into shared.place. The search
  // may end there: all of the bin is needed, or it holds one id. (Each weighs at least what the
  // last of the bin would.)
  template <typename Amount, typename Needed>
  __device__ void find_bin(uint64_t& left, uint32_t prefix, int shift, bool first,
                           const Amount& amount, const Needed& needed) {
    constexpr int kOwn = kFilterBins / kWarpSize;
    const int lane = threadIdx.x;
    uint64_t own = 0;
    for (int i = 0; i < kOwn; ++i) own += shared.totals[lane * kOwn + i];
    uint64_t sum = own;  // of the lanes up to this one
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t below = __shfl_up_sync(kFullWarp, sum, offset);
      if (lane >= offset) sum += below;
    }
    const uint64_t total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    if (first) left = needed(total);
    const unsigned reached = __ballot_sync(kFullWarp, sum >= left);
    const int finder = reached != 0 ? __ffs(reached) - 1 : kWarpSize - 1;
    uint64_t rest = left - (sum - own);  // the finder's: what its own bins have to give
    if (lane == finder) {
      int bin = lane * kOwn;
      for (; bin < lane * kOwn + kOwn - 1 && shared.totals[bin] < rest; ++bin)
        rest -= shared.totals[bin];
      const uint64_t in_bin = shared.totals[bin];
      const uint32_t found = prefix << kFilterBinBits | static_cast<uint32_t>(bin);
      const uint32_t last = last_of(found, shift);
      const bool done =
          reached == 0 || shift == 0 || in_bin == rest || in_bin < 2 * uint64_t{amount(last)};
      shared.place = {reached == 0 ? kFilterBins - 1u : found, done ? 1 : 0};
    }
    left = __shfl_sync(kFullWarp, rest, finder);
  }
};

}  // namespace photon::cuda
