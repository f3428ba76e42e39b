// What a CTA of balanced_attention holds in shared memory, and how queries, keys and values are
// copied there.
//
// All tiles lie as instructions of a warpgroup take them: slices of 64 columns one after the other,
// a slice its rows of 128 bytes, of which vector v of row r lies at v ^ r % 8.
#pragma once
#include <climits>

#include "common/kv.h"
#include "cuda/attention/balanced_tokens.cuh"
#include "cuda/attention/tile_tensors.cuh"
#include "cuda/bf16.cuh"
#include "cuda/ptx.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda {

constexpr int kBalancedStages = 2;  // of keys, and of values
constexpr int kConsumers = 2;       // warpgroups, each with half of a tile's rows
constexpr int kProducerBarrier = 1, kConsumerBarrier = 2;  // and the one behind it: of warpgroups
constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kWarpRuns = kTileKeys / kGroupWarps / kRunTokens;  // that a warp copies of a tile
static_assert(kTileKeys / kGroupWarps == kWarpSize);

template <int kHeadDim_, bool kIsExact_>
struct BalancedPlan {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsExact = kIsExact_;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kVectors = kHeadDim / 8;              // of a row, 16 bytes each
  static constexpr int kStepRows = kWarpSize / kVectors;     // rows that a warp copies at once
  static constexpr int kSlice = kTileKeys * kKBlockColumns;  // elements
  static constexpr int kSliceBytes = kSlice * 2;
  static constexpr int kTile = kTileKeys * kHeadDim;
  static constexpr int kColumns = kHeadDim / 8;  // groups of eight columns of the output
  static_assert(kTileRows == kTileKeys, "queries lie as keys do");
  static_assert(kHeadDim == 64 || kHeadDim == 128);

  // Where a vector of a row stands in a tile.
  static __device__ int place(int row, int vector) {
    return vector / 8 * kSlice + row * kKBlockColumns + (vector % 8 ^ row % 8) * 8;
  }
};

template <typename Plan>
struct BalancedShared {
  alignas(1024)
      Bf16 queries[2][Plan::kTile];  // later the outputs; of a partial tile and of the next one
  alignas(1024) Bf16 keys[kBalancedStages][Plan::kTile];
  alignas(1024) Bf16 values[kBalancedStages][Plan::kTile];
  Barrier has_keys[kBalancedStages], has_values[kBalancedStages], has_queries[2];
  Barrier keys_read[kBalancedStages], values_read[kBalancedStages], queries_read[2];
  Barrier has_raw_values;  // a tile of values in which the producer has to look first
  int32_t poisoned[2][Plan::kHeadDim + 1];  // of a partial tile, by dim: the lowest position whose
                                            // value was not finite, and so was hidden; INT_MAX:
                                            // none. Of all dims, at the end
  int32_t is_last[kConsumers];
  // Of an exact step: what the queries of the same place are of (none: the end), and the item
  // behind the one that is copied.
  PartialTile partials[2];
  int32_t claimed;
};

// A place in the ring of tiles of keys or of values, or of queries: the index of the tile, and the
// parity of the round.
__device__ inline int stage_of(int index) { return index % kBalancedStages; }
__device__ inline uint32_t parity_of(int index) { return index / kBalancedStages % 2; }

// The first of the keys of a tile that the warp copies.
__device__ inline int warp_key() {
  return static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps * kWarpSize;
}

// A row of a tile: which of the partial tile's tokens, and which of the query heads of its KV head.
// The thread's next row is `step` rows later.
struct QueryRow {
  int token, head;

  __device__ QueryRow(int row, int step, int sharers)
      : token(row / sharers),
        head(row % sharers),
        sharers_(sharers),
        step_tokens_(step / sharers),
        step_heads_(step % sharers) {}

  __device__ void advance() {
    token += step_tokens_;
    head += step_heads_;
    if (head < sharers_) return;
    head -= sharers_;
    ++token;
  }

 private:
  int sharers_, step_tokens_, step_heads_;
};

// Copies the queries of a partial tile's rows. Rows that are in no token stay as they are.
template <typename Plan>
__device__ void copy_queries(const PagedAttentionParams& p, const PartialTile& partial, int sharers,
                             Bf16* to) {
  constexpr int kStep = kGroupWarps * Plan::kStepRows;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % kGroupWarps,
            vector = lane % Plan::kVectors, first = warp * Plan::kStepRows + lane / Plan::kVectors;
  const Bf16* const from = static_cast<const Bf16*>(p.q) + partial.first_token * p.q_stride +
                           partial.kv_head * sharers * p.q_head_stride + vector * 8;
  QueryRow row(first, kStep, sharers);
  for (int i = first; row.token < partial.tokens; i += kStep, row.advance())
    async_copy16(to + Plan::place(i, vector),
                 from + row.token * p.q_stride + row.head * p.q_head_stride, true);
}

// Where the keys lie that a warp copies, run by run: of the tile's runs those that begin within the
// contexts.
struct KeyRuns {
  KvPlace of[kWarpRuns];
  int count;
};

// Of the tile of keys that starts at `first_position`.
__device__ inline KeyRuns look_up(const KvCache& cache, const Lengths& lengths,
                                  int32_t first_position) {
  const int32_t first = first_position + warp_key();
  KeyRuns runs;
  runs.count = min(max((lengths.most - first + kRunTokens - 1) / kRunTokens, 0), kWarpRuns);
#pragma unroll
  for (int i = 0; i < kWarpRuns; ++i) {
    runs.of[i] =
        i < runs.count ? find_place(cache, lengths.row, first + i * kRunTokens) : KvPlace{-1, 0};
  }
  return runs;
}

// Starts the warp's copies of a tile of keys, or of values, which count towards `barrier`. What is
// in no page becomes zeros; behind the contexts there may be anything.
template <typename Plan>
__device__ void copy_tile(const RowTileMap& map, const TileTensor& tensor, int kv_head,
                          const KeyRuns& runs, Bf16* to, Barrier* barrier) {
  __syncwarp();  // else the barrier that a late lane waits for could be two phases on
  if (!is_elected()) return;
  const uint64_t policy = evict_normal();
  arrive_expecting(barrier, runs.count * kRunTokens * Plan::kHeadDim * sizeof(Bf16));
#pragma unroll
  for (int i = 0; i < kWarpRuns; ++i) {
    if (i >= runs.count) continue;
    const int row = tensor.row(runs.of[i], kv_head), key = warp_key() + i * kRunTokens;
#pragma unroll
    for (int slice = 0; slice < Plan::kHeadDim / kKBlockColumns; ++slice) {
      copy_row_tile(to + slice * Plan::kSlice + key * kKBlockColumns, map, row,
                    kv_head * tensor.head_slices + slice, barrier, policy);
    }
  }
}

// Whether one of two bf16 is not finite: its exponent is all ones.
__device__ inline bool is_odd(uint32_t pair) {
  return (((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}

// Replaces what is not finite in a vector of a value by zeros, and notes its position.
template <typename Plan>
__device__ void hide_vector(uint4* own, int vector, int32_t position, int32_t* poisoned) {
  uint32_t words[4] = {own->x, own->y, own->z, own->w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const uint32_t exponent = 0x7f80u << (e % 2 * 16);
    if ((words[e / 2] & exponent) != exponent) continue;
    words[e / 2] &= e % 2 == 0 ? 0xffff0000u : 0xffffu;
    atomicMin(poisoned + vector * 8 + e, position);
    atomicMin(poisoned + Plan::kHeadDim, position);
  }
  *own = uint4{words[0], words[1], words[2], words[3]};
}

// Clears the values behind the contexts, and those that are not finite from position
// `lengths.least` on, whose positions it notes in `poisoned`. A row that does not attend to such a
// value would multiply it by a weight of zero, which gives NaN; rows that do get their NaN from
// spoil_sums(). Each warp looks at what it has copied itself.
template <typename Plan>
__device__ void hide_values(Bf16* values, int32_t first_position, const Lengths& lengths,
                            int32_t* poisoned) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kWarpSize, vector = lane % Plan::kVectors,
            first = warp_key() + lane / Plan::kVectors;
  for (int base = 0; base < kWarpSize; base += kAtOnce * Plan::kStepRows) {
    uint4* own[kAtOnce];
    bool is_bad[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own[i] = reinterpret_cast<uint4*>(values +
                                        Plan::place(first + base + i * Plan::kStepRows, vector));
      const uint4 v = *own[i];
      is_bad[i] = is_odd(v.x) || is_odd(v.y) || is_odd(v.z) || is_odd(v.w);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t position = first_position + first + base + i * Plan::kStepRows;
      if (position >= lengths.most) {
        *own[i] = uint4{};
      } else if (is_bad[i] && position >= lengths.least) {
        hide_vector<Plan>(own[i], vector, position, poisoned);
      }
    }
  }
}

}  // namespace photon::cuda
