// How a CTA of chunk_attention copies queries, keys and values into its shared memory.
//
// Keys and values come by tensor copies where the cache has boxes (cache_boxes.cuh), which the
// warps divide among them. Queries, and keys and values of other caches, come by vectors: a warp
// copies kStepRows rows of a tile at once, and each lane one vector of a row. Either way a lane
// looks up a place for the warp one turn ahead. A CTA goes through one tile of keys each turn, and
// turn t uses stage t % kStages.
#pragma once
#include "cuda/cache_boxes.cuh"
#include "cuda/chunk_tile.cuh"

namespace photon::cuda {

// Copies the queries of the warp's rows that are in the run. The other rows stay as they are.
template <typename Plan>
__device__ void copy_queries(const PagedAttentionParams& p, ChunkShared<Plan>& shared) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * Plan::kWarpRows;
  const ChunkTask task = shared.task;
  const Run run = shared.run;
  if (lane >= Plan::kStepRows * Plan::kVectors) return;
  for (int i = lane / Plan::kVectors; i < Plan::kWarpRows; i += Plan::kStepRows) {
    const int row = first_row + i, vector = lane % Plan::kVectors;
    if (!run.has(row / task.group)) continue;
    const int64_t from = task.offset(row, p.q_stride, p.q_head_stride) + vector * kVector;
    async_copy16(shared.q + Plan::place(Plan::kRows, row, vector),
                 static_cast<const Bf16*>(p.q) + from, true);
  }
  commit_copies();
}

// --- keys and values by vectors ------------------------------------------------------------------

// Each lane looks up one of the keys that its warp copies.
template <typename Plan>
__device__ KvPlace look_up_key(const KvCache& cache, const Run& run, int32_t position) {
  const int lane = threadIdx.x % kWarpSize;
  position += threadIdx.x / kWarpSize * Plan::kWarpKeys + lane;
  if (lane >= Plan::kWarpKeys || position >= run.part.end) return {-1, 0};
  return find_place(cache, run.row, position);
}

// Starts the warp's copies of vectors of a tile, from the places that its lanes have looked up.
// Where there is no place, it writes zeros. Where pages hold whole tiles of a warp's keys, the
// first key's place says where all are; behind the context's end that is what the page holds, which
// hide_scores() and hide_values() keep out.
template <typename Plan>
__device__ void copy_vectors(const KvCache& cache, int kv_head, const KvPlace& place, Bf16* k,
                             Bf16* v) {
  const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * Plan::kWarpKeys;
  const int row = lane / Plan::kVectors, vector = lane % Plan::kVectors;
  const bool is_busy = lane < Plan::kStepRows * Plan::kVectors;
  const auto copy = [&](int i, const void* k_from, const void* v_from, bool valid) {
    const int to = Plan::place(kTileKeys, first_key + i + row, vector);
    async_copy16(k + to, k_from, valid);
    async_copy16(v + to, v_from, valid);
  };
  const Bf16 *const all_k = static_cast<const Bf16*>(cache.k) + vector * kVector,
                    *const all_v = static_cast<const Bf16*>(cache.v) + vector * kVector;
  if (cache.page_size % Plan::kWarpKeys == 0) {
    const KvPlace first = {__shfl_sync(kFullWarp, place.page, 0),
                           __shfl_sync(kFullWarp, place.token, 0) + row};
    const bool valid = first.page >= 0;
    const Bf16* k_from = valid ? all_k + first.k_offset(cache, kv_head) : all_k;
    const Bf16* v_from = valid ? all_v + first.v_offset(cache, kv_head) : all_v;
    if (!is_busy) return;
#pragma unroll
    for (int i = 0; i < Plan::kWarpKeys; i += Plan::kStepRows) {
      copy(i, k_from, v_from, valid);
      if (valid) {
        k_from += Plan::kStepRows * cache.k_token_stride;
        v_from += Plan::kStepRows * cache.v_token_stride;
      }
    }
    return;
  }
  const long long own_k = place.page < 0 ? -1 : place.k_offset(cache, kv_head);
  const long long own_v = place.page < 0 ? -1 : place.v_offset(cache, kv_head);
  for (int i = 0; i < Plan::kWarpKeys; i += Plan::kStepRows) {
    const long long from_k = __shfl_sync(kFullWarp, own_k, i + row),
                    from_v = __shfl_sync(kFullWarp, own_v, i + row);
    const bool valid = from_k >= 0;
    if (is_busy) copy(i, all_k + (valid ? from_k : 0), all_v + (valid ? from_v : 0), valid);
  }
}

// --- keys and values by boxes --------------------------------------------------------------------

// How the warps divide the boxes of a tile. A kind of boxes is one slice of keys, or of values. A
// warp has kWarpKinds kinds, or shares its kind with others: then it has every kStep-th box.
template <typename Plan>
struct BoxShare {
  static constexpr int kKinds = 2 * Plan::kSlices;
  static constexpr int kWarpKinds = kKinds > Plan::kWarps ? kKinds / Plan::kWarps : 1;
  static constexpr int kStep = kKinds < Plan::kWarps ? Plan::kWarps / kKinds : 1;
  static_assert(kKinds % Plan::kWarps == 0 || Plan::kWarps % kKinds == 0);

  int first_kind = threadIdx.x / kWarpSize % kKinds, first_box = threadIdx.x / kWarpSize / kKinds;
};

// Each lane looks up the page of one of its warp's boxes, the first ones in order.
template <typename Plan>
__device__ KvPlace look_up_box(const KvCache& cache, const CacheBoxes& boxes, const Run& run,
                               int32_t position) {
  using Share = BoxShare<Plan>;
  const int lane = threadIdx.x % kWarpSize, box = Share().first_box + lane * Share::kStep;
  position += box << boxes.token_shift;
  if (position >= run.part.end) return {-1, 0};
  const int32_t slot = position >> boxes.page_shift;
  const int32_t page = cache.page_table == nullptr
                           ? run.row
                           : cache.page_table[run.row * cache.pages_per_row + slot];
  const bool valid = static_cast<uint32_t>(page) < static_cast<uint32_t>(cache.num_pages);
  return {valid ? page : -1, position - (slot << boxes.page_shift)};
}

// Starts the warp's copies of boxes of a tile, from the places that its lanes have looked up. Boxes
// of no page bring zeros. The first warp announces the bytes of all.
template <typename Plan>
__device__ void copy_boxes(const CacheBoxes& boxes, const KvPlace& place, ChunkShared<Plan>& shared,
                           uint32_t stage) {
  using Share = BoxShare<Plan>;
  constexpr int kSlice = kTileKeys * kSliceColumns;  // elements
  const Share share;
  const int own_block = boxes.block(place.page, shared.task.kv_head),
            box_elements = boxes.tokens * kSliceColumns, count = kTileKeys >> boxes.token_shift;
  Barrier* const arrived = &shared.arrived[stage];
  if (threadIdx.x < kWarpSize && is_elected())
    arrive_expecting(arrived, Share::kKinds * kSlice * sizeof(Bf16));
#pragma unroll
  for (int j = 0; j < Share::kWarpKinds; ++j) {
    const int kind = share.first_kind + j * Plan::kWarps, is_value = kind / Plan::kSlices,
              slice = kind % Plan::kSlices, column = computed_now(slice * kSliceColumns);
    const CUtensorMap* const map = computed_now(&boxes.maps[is_value]);
    Bf16* const tile = shared.keys(stage) + is_value * kStages * Plan::kTile + slice * kSlice;
#pragma unroll 1
    for (int i = 0, box = share.first_box; box < count; ++i, box += Share::kStep) {
      const int block = __shfl_sync(kFullWarp, own_block, i),
                token = __shfl_sync(kFullWarp, place.token, i);
      if (is_elected())
        tensor_copy(tile + box * box_elements, map, {column, token, block}, arrived);
    }
  }
}

// --- keys and values either way ------------------------------------------------------------------

// Before the first copy. All threads must call it, and meet at a barrier afterwards.
template <typename Plan>
__device__ void prepare_copies(const CacheBoxes& boxes, ChunkShared<Plan>& shared) {
  if constexpr (kHopperCode) {
    if (threadIdx.x != 0 || !boxes.are_there()) return;
    for (const CUtensorMap& map : boxes.maps) prefetch_tensor_map(&map);
    for (Barrier& barrier : shared.arrived) init_barrier(&barrier, 1);
    fence_barriers();
  }
}

// Looks up what lies where, for the tile of keys that starts at `position`. Page -1: the lane has
// nothing to look up, or it is in no page.
template <typename Plan>
__device__ KvPlace look_up(const KvCache& cache, const CacheBoxes& boxes, const Run& run,
                           int32_t position) {
  if (kHopperCode && boxes.are_there()) return look_up_box<Plan>(cache, boxes, run, position);
  return look_up_key<Plan>(cache, run, position);
}

// Starts this warp's copies of a tile of keys and values.
template <typename Plan>
__device__ void copy_keys(const KvCache& cache, const CacheBoxes& boxes, const KvPlace& place,
                          ChunkShared<Plan>& shared, uint32_t turn) {
  const uint32_t stage = turn % kStages;
  if constexpr (kHopperCode) {
    if (boxes.are_there()) return copy_boxes(boxes, place, shared, stage);
  }
  copy_vectors<Plan>(cache, shared.task.kv_head, place, shared.keys(stage), shared.values(stage));
  commit_copies();
}

// Waits until this thread's copies have arrived, those of queries too; with boxes, all threads'
// copies of keys and values.
template <typename Plan>
__device__ void await_keys(const CacheBoxes& boxes, ChunkShared<Plan>& shared, uint32_t turn) {
  wait_copies<0>();
  if constexpr (kHopperCode) {
    if (boxes.are_there()) wait_barrier(&shared.arrived[turn % kStages], turn / kStages % 2);
  }
}

// Replaces values that are not finite by zeros, and notes their positions in `poisoned`, by dim. A
// row that does not attend to such a value would multiply it by a weight of zero, which gives NaN;
// rows that do attend to it get their NaN from spoil_sums(). Each thread checks the vectors that it
// copies itself where there are no boxes, so that no barrier is needed in between.
template <typename Plan>
__device__ void hide_values(Bf16* v, int32_t first_position, int32_t* poisoned) {
  const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * Plan::kWarpKeys,
            vector = lane % Plan::kVectors;
  if (lane >= Plan::kStepRows * Plan::kVectors) return;
  for (int i = lane / Plan::kVectors; i < Plan::kWarpKeys; i += Plan::kStepRows) {
    uint4* own = reinterpret_cast<uint4*>(v + Plan::place(kTileKeys, first_key + i, vector));
    uint32_t words[4] = {own->x, own->y, own->z, own->w};
    bool changed = false;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const uint32_t exponent = 0x7f80u << (e % 2 * 16);
      if ((words[e / 2] & exponent) != exponent) continue;
      words[e / 2] &= e % 2 == 0 ? 0xffff0000u : 0xffffu;
      atomicMin(poisoned + vector * kVector + e, first_position + first_key + i);
      changed = true;
    }
    if (changed) *own = uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace photon::cuda
