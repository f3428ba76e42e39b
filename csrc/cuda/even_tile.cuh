// What a CTA of even_attention holds in shared memory, and how its producer copies queries, keys
// and values there.
//
// All tiles lie as instructions of a warpgroup take them: slices of 64 columns one after the other,
// a slice its rows of 128 bytes, of which vector v of row r lies at v ^ r % 8.
#pragma once
#include <climits>

#include "common/kv.h"
#include "cuda/bf16.cuh"
#include "cuda/even_multiply.cuh"
#include "cuda/even_parts.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {

constexpr int kEvenStages = 2;  // of keys, and of values
constexpr int kConsumers = 2;   // warpgroups, each with half of a tile's rows
constexpr int kProducerBarrier = 1, kConsumerBarrier = 2;  // and the one behind it: of warpgroups
constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kRunKeys = 16;  // keys that lie one after the other in memory, from a multiple on
constexpr int kWarpRuns = kUnitKeys / kGroupWarps / kRunKeys;  // that a warp copies of a tile
static_assert(kUnitKeys / kGroupWarps == kWarpSize);

template <int kHeadDim_>
struct EvenPlan {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kVectors = kHeadDim / 8;             // of a row, 16 bytes each
  static constexpr int kStepRows = kWarpSize / kVectors;    // rows that a warp copies at once
  static constexpr int kSlice = kUnitKeys * kSliceColumns;  // elements
  static constexpr int kSliceBytes = kSlice * 2;
  static constexpr int kTile = kUnitKeys * kHeadDim;
  static constexpr int kColumns = kHeadDim / 8;  // groups of eight columns of the output
  static_assert(kTileRows == kUnitKeys, "queries lie as keys do");
  static_assert(kHeadDim == 64 || kHeadDim == 128);

  // Where a vector of a row stands in a tile.
  static __device__ int place(int row, int vector) {
    return vector / 8 * kSlice + row * kSliceColumns + (vector % 8 ^ row % 8) * 8;
  }

  // The same for the row `by` rows later. `by` must be a multiple of kStepRows, and row % 8 of the
  // first row below kStepRows.
  static __device__ int place_after(int place, int by) {
    return (place ^ by % 8 * 8) + by * kSliceColumns;
  }
};

template <typename Plan>
struct EvenShared {
  alignas(1024) Bf16 queries[2][Plan::kTile];  // later the outputs; of a part and of the next one
  alignas(1024) Bf16 keys[kEvenStages][Plan::kTile];
  alignas(1024) Bf16 values[kEvenStages][Plan::kTile];
  Barrier has_keys[kEvenStages], has_values[kEvenStages];  // a tile is there (the first part's
                                                           // queries with the first keys)
  Barrier keys_read[kEvenStages], values_read[kEvenStages], queries_read[2];
  int32_t poisoned[2][Plan::kHeadDim + 1];  // of a part, by dim: the lowest position whose value
                                            // was not finite, and so was hidden; INT_MAX: none. Of
                                            // all dims, at the end
  int32_t is_last[kConsumers];
  Items items;
};

// A place in the ring of tiles of keys or of values, or of queries: the index of the tile, and the
// parity of the round.
__device__ inline int stage_of(int index) { return index % kEvenStages; }
__device__ inline uint32_t parity_of(int index) { return index / kEvenStages % 2; }

// The first of the keys of a tile that the warp copies.
__device__ inline int warp_key() {
  return static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps * kWarpSize;
}

// Copies the queries of a part's rows. Rows that are in no token stay as they are.
template <typename Plan>
__device__ void copy_queries(const PagedAttentionParams& p, const Part& part, Bf16* to) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % kGroupWarps,
            vector = lane % Plan::kVectors;
  const int group = static_cast<int>(p.q_heads / p.kv_heads), rows = part.tokens * group;
  for (int row = warp * Plan::kStepRows + lane / Plan::kVectors; row < rows;
       row += kGroupWarps * Plan::kStepRows) {
    const int64_t from = (part.first_token + row / group) * p.q_stride +
                         (part.kv_head * group + row % group) * p.q_head_stride + vector * 8;
    async_copy16(to + Plan::place(row, vector), static_cast<const Bf16*>(p.q) + from, true);
  }
}

// Where the keys lie that a warp copies, run by run; page -1: in no page, or behind the contexts.
struct KeyRuns {
  KvPlace of[kWarpRuns];
};

// Of the tile of keys that starts at `first_position`.
__device__ inline KeyRuns look_up(const KvCache& cache, const Lengths& lengths,
                                  int32_t first_position) {
  KeyRuns runs;
#pragma unroll
  for (int i = 0; i < kWarpRuns; ++i) {
    const int32_t position = first_position + warp_key() + i * kRunKeys;
    runs.of[i] =
        position < lengths.most ? find_place(cache, lengths.row, position) : KvPlace{-1, 0};
  }
  return runs;
}

// Starts the warp's copies of one run of keys, or of values: of `count` rows, which are so many
// elements apart in `from`. The rows behind them become zeros.
template <typename Plan>
__device__ void copy_run(const Bf16* from, int64_t stride, int count, Bf16* to) {
  const int lane = threadIdx.x % kWarpSize, vector = lane % Plan::kVectors,
            row = lane / Plan::kVectors;
  const int first = Plan::place(row, vector);
  from += row * stride + vector * 8;
#pragma unroll
  for (int i = 0; i < kRunKeys; i += Plan::kStepRows) {
    async_copy16(to + Plan::place_after(first, i), from, row + i < count);
    from += Plan::kStepRows * stride;
  }
}

// Starts the warp's copies of a tile of keys, or of values, of which `left` rows belong to the
// contexts. `from` is where the KV head begins in the cache.
template <typename Plan>
__device__ void copy_tile(const Bf16* from, int64_t page_stride, int64_t token_stride,
                          const KeyRuns& runs, int32_t left, Bf16* to) {
#pragma unroll
  for (int i = 0; i < kWarpRuns; ++i) {
    const KvPlace place = runs.of[i];
    const bool is_there = place.page >= 0;
    const int64_t offset = is_there ? place.page * page_stride + place.token * token_stride : 0;
    const int key = warp_key() + i * kRunKeys;
    copy_run<Plan>(from + offset, token_stride, is_there ? left - key : 0,
                   to + key * kSliceColumns);
  }
}

template <typename Plan>
__device__ void copy_keys(const KvCache& cache, int kv_head, const KeyRuns& runs, int32_t left,
                          Bf16* to) {
  copy_tile<Plan>(static_cast<const Bf16*>(cache.k) + kv_head * cache.k_head_stride,
                  cache.k_page_stride, cache.k_token_stride, runs, left, to);
}

template <typename Plan>
__device__ void copy_values(const KvCache& cache, int kv_head, const KeyRuns& runs, int32_t left,
                            Bf16* to) {
  copy_tile<Plan>(static_cast<const Bf16*>(cache.v) + kv_head * cache.v_head_stride,
                  cache.v_page_stride, cache.v_token_stride, runs, left, to);
}

// Whether one of two bf16 is not finite: its exponent is all ones.
__device__ inline bool is_odd(uint32_t pair) {
  return (((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}

// Replaces values that are not finite by zeros, from position `least` on, and notes their positions
// in `poisoned`. A row that does not attend to such a value would multiply it by a weight of zero,
// which gives NaN; rows that do get their NaN from spoil_sums(). Each thread checks what it has
// copied itself.
template <typename Plan>
__device__ void hide_values(Bf16* values, int32_t first_position, int32_t least,
                            int32_t* poisoned) {
  const int lane = threadIdx.x % kWarpSize, vector = lane % Plan::kVectors;
  for (int i = 0; i < kWarpSize; i += Plan::kStepRows) {
    const int row = warp_key() + lane / Plan::kVectors + i;
    if (first_position + row < least) continue;
    uint4* own = reinterpret_cast<uint4*>(values + Plan::place(row, vector));
    uint32_t words[4] = {own->x, own->y, own->z, own->w};
    if (!is_odd(words[0]) && !is_odd(words[1]) && !is_odd(words[2]) && !is_odd(words[3])) continue;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t exponent = 0x7f80u << (e % 2 * 16);
      if ((words[e / 2] & exponent) != exponent) continue;
      words[e / 2] &= e % 2 == 0 ? 0xffff0000u : 0xffffu;
      atomicMin(poisoned + vector * 8 + e, first_position + row);
      atomicMin(poisoned + Plan::kHeadDim, first_position + row);
    }
    *own = uint4{words[0], words[1], words[2], words[3]};
  }
}

// What the producer knows of a part before it copies.
struct NextPart {
  bool is_there;
  Part part;
  Lengths lengths;
  KeyRuns runs;  // of the first tile
};

__device__ inline NextPart prepare_part(const PagedAttentionParams& p, const StepTokens& tokens,
                                        Share& share) {
  NextPart next;
  next.is_there = share.next(next.part);
  if (!next.is_there) return next;
  next.lengths = load_lengths(tokens, next.part);
  next.runs = look_up(p.cache, next.lengths, next.part.begin * kUnitKeys);
  return next;
}

// The producer: one warpgroup, which copies what the share's parts need. What it has to know of a
// part it finds out while it copies the one before; of the first, while the kernels before still
// run.
template <typename Plan>
__device__ void produce(const PagedAttentionParams& p, const StepTokens& tokens, Share share,
                        EvenShared<Plan>& shared) {
  NextPart next = prepare_part(p, tokens, share);
  wait_for_earlier();
  for (int number = 0, index = 0; next.is_there; ++number) {
    const Part part = next.part;
    const Lengths lengths = next.lengths;
    KeyRuns runs = next.runs;
    int32_t* const poisoned = shared.poisoned[number % 2];
    wait_barrier(&shared.queries_read[number % 2], parity_of(number) ^ 1);
    for (int d = threadIdx.x % kWarpgroupThreads; d <= Plan::kHeadDim; d += kWarpgroupThreads)
      poisoned[d] = INT_MAX;
    sync_threads(kProducerBarrier, kWarpgroupThreads);
    copy_queries<Plan>(p, part, shared.queries[number % 2]);
    for (int unit = part.begin; unit < part.end; ++unit, ++index) {
      const int stage = stage_of(index);
      const int32_t first_position = unit * kUnitKeys, left = lengths.most - first_position;
      const KeyRuns own = runs;
      wait_barrier(&shared.keys_read[stage], parity_of(index) ^ 1);
      copy_keys<Plan>(p.cache, part.kv_head, own, left, shared.keys[stage]);
      arrive_when_copied(&shared.has_keys[stage]);
      if (unit + 1 < part.end) {
        runs = look_up(p.cache, lengths, first_position + kUnitKeys);
      } else {
        next = prepare_part(p, tokens, share);
      }
      wait_barrier(&shared.values_read[stage], parity_of(index) ^ 1);
      copy_values<Plan>(p.cache, part.kv_head, own, left, shared.values[stage]);
      if (first_position + kUnitKeys <= lengths.least) {
        arrive_when_copied(&shared.has_values[stage]);
        continue;
      }
      commit_copies();
      wait_copies<0>();
      hide_values<Plan>(shared.values[stage], first_position, lengths.least, poisoned);
      arrive(&shared.has_values[stage]);
    }
  }
}

}  // namespace photon::cuda
