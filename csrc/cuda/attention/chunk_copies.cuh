// How a CTA of chunk_attention copies queries, keys and values into its shared memory. A warp
// copies kStepRows rows of a tile at once; each lane copies one vector of a row.
#pragma once
#include "cuda/attention/chunk_tile.cuh"

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
    async_copy16(shared.q + Plan::place(row, vector), static_cast<const Bf16*>(p.q) + from, true);
  }
}

// Looks up where one key lies, for the tile of keys that starts at `position`. Each lane looks up
// one of the keys that its warp copies; page -1: the lane has none, or the key is in no page.
template <typename Plan>
__device__ KvPlace look_up(const KvCache& cache, const Run& run, int32_t position) {
  const int lane = threadIdx.x % kWarpSize;
  position += threadIdx.x / kWarpSize * Plan::kWarpKeys + lane;
  if (lane >= Plan::kWarpKeys || position >= run.part.end) return {-1, 0};
  return find_place(cache, run.row, position);
}

// Starts the warp's copies of a tile of keys and values, from the places that its lanes have looked
// up. Where there is no place, it writes zeros.
template <typename Plan>
__device__ void copy_keys(const KvCache& cache, int kv_head, const KvPlace& place, Bf16* k,
                          Bf16* v) {
  const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * Plan::kWarpKeys;
  const long long own_k = place.page < 0 ? -1 : place.k_offset(cache, kv_head);
  const long long own_v = place.page < 0 ? -1 : place.v_offset(cache, kv_head);
#pragma unroll
  for (int i = 0; i < Plan::kWarpKeys; i += Plan::kStepRows) {
    const int key = i + lane / Plan::kVectors, vector = lane % Plan::kVectors,
              to = Plan::place(first_key + key, vector);
    const long long from_k = __shfl_sync(kFullWarp, own_k, key),
                    from_v = __shfl_sync(kFullWarp, own_v, key);
    const bool valid = from_k >= 0;
    if (lane >= Plan::kStepRows * Plan::kVectors) continue;
    async_copy16(
        k + to, static_cast<const Bf16*>(cache.k) + (valid ? from_k + vector * kVector : 0), valid);
    async_copy16(
        v + to, static_cast<const Bf16*>(cache.v) + (valid ? from_v + vector * kVector : 0), valid);
  }
}

// Replaces values that are not finite by zeros, and notes their positions in `poisoned`, by dim. A
// row that does not attend to such a value would multiply it by a weight of zero, which gives NaN;
// rows that do attend to it get their NaN from spoil_sums(). Each thread checks what it has copied
// itself, so that no barrier is needed in between.
template <typename Plan>
__device__ void hide_values(Bf16* v, int32_t first_position, int32_t* poisoned) {
  const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * Plan::kWarpKeys,
            vector = lane % Plan::kVectors;
  if (lane >= Plan::kStepRows * Plan::kVectors) return;
  for (int i = lane / Plan::kVectors; i < Plan::kWarpKeys; i += Plan::kStepRows) {
    uint4* own = reinterpret_cast<uint4*>(v + Plan::place(first_key + i, vector));
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
