// How a CTA of chunk_attention copies queries, keys and values into its shared memory. A warp
// copies kStepRows rows of a tile at once; each lane copies one vector of a row.
//
// Keys and values in fp8 are copied as they are, beside the tile. When all warps have left the tile
// before, each lane decodes what it has copied itself into bfloat16, which is exact. Their scales
// are copied, too; they multiply scores and weights (chunk_tile.cuh).
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

// The vector of codes that a lane copies at once: of which of the rows that its warp copies
// together, and which of that row. Where rows are four or eight vectors, eight lanes in a row have
// four vectors of each of two rows, so that what they decode goes to different banks.
template <typename Plan>
struct CodeVector {
  static constexpr int kCodes = kVectorBytes, kVectors = Plan::kHeadDim / kCodes;  // of a row
  static constexpr int kRows = kVectors <= 4 ? 8 : 4, kLanes = kRows * kVectors;
  static constexpr int kSteps = Plan::kWarpKeys / kRows;
  static_assert(kLanes <= kWarpSize && Plan::kWarpKeys % kRows == 0);

  int row, vector;

  static __device__ CodeVector of(int lane) {
    if constexpr (kVectors % 4 != 0) return {lane / kVectors, lane % kVectors};
    return {lane / (2 * kVectors) * 2 + lane / 4 % 2, lane % (2 * kVectors) / 8 * 4 + lane % 4};
  }

  // Where a lane finds again what it has copied in this step.
  static __device__ int place(int step) {
    return (threadIdx.x / kWarpSize * kSteps + step) * kLanes + threadIdx.x % kWarpSize;
  }
};

// Starts the warp's copies of the scales of a tile, of the key that each lane has looked up.
template <typename Plan>
__device__ void copy_scales(const KvCache& cache, int kv_head, const KvPlace& place,
                            TileScales<kTileKeys>& scales) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane >= Plan::kWarpKeys) return;
  const int key = threadIdx.x / kWarpSize * Plan::kWarpKeys + lane;
  const bool valid = place.page >= 0;
  const int64_t k = valid ? place.k_scale_offset(cache, kv_head) : 0,
                v = valid ? place.v_scale_offset(cache, kv_head) : 0;
  async_copy<4>(scales.keys + key, cache.scales + k, valid);
  async_copy<4>(scales.values + key, cache.scales + v, valid);
}

// copy_keys() of keys and values in fp8.
template <typename Plan>
__device__ void copy_codes(const KvCache& cache, int kv_head, const KvPlace& place,
                           ChunkShared<Plan>& shared) {
  using Codes = CodeVector<Plan>;
  const int lane = threadIdx.x % kWarpSize;
  const long long own_k = place.page < 0 ? -1 : place.k_offset(cache, kv_head);
  const long long own_v = place.page < 0 ? -1 : place.v_offset(cache, kv_head);
  const Codes own = Codes::of(lane);
#pragma unroll
  for (int step = 0; step < Codes::kSteps; ++step) {
    const int key = step * Codes::kRows + own.row, to = Codes::place(step);
    const long long from_k = __shfl_sync(kFullWarp, own_k, key),
                    from_v = __shfl_sync(kFullWarp, own_v, key);
    const bool valid = from_k >= 0;
    if (lane >= Codes::kLanes) continue;
    const int64_t k = valid ? from_k + own.vector * Codes::kCodes : 0,
                  v = valid ? from_v + own.vector * Codes::kCodes : 0;
    async_copy16(shared.key_codes() + to, static_cast<const E4m3*>(cache.k) + k, valid);
    async_copy16(shared.value_codes() + to, static_cast<const E4m3*>(cache.v) + v, valid);
  }
}

// Starts the warp's copies of the tile of keys and values of this stage, as copy_keys() says.
template <typename Plan>
__device__ void copy_tile(const KvCache& cache, const KvPlace& place, ChunkShared<Plan>& shared,
                          int stage) {
  const int kv_head = shared.task.kv_head;
  if constexpr (Plan::kIsScaled) {
    copy_scales<Plan>(cache, kv_head, place, shared.scales[stage]);
    copy_codes<Plan>(cache, kv_head, place, shared);
  } else {
    copy_keys<Plan>(cache, kv_head, place, shared.keys(stage), shared.values(stage));
  }
  commit_copies();
}

// Writes sixteen codes as vectors 2 i and 2 i + 1 of a row of a tile.
template <typename Plan>
__device__ void decode_vector(Bf16* tile, int row, int i, const uint4& codes) {
  uint32_t pairs[4][2];
  bf16_of_e4m3(pairs[0], codes.x);
  bf16_of_e4m3(pairs[1], codes.y);
  bf16_of_e4m3(pairs[2], codes.z);
  bf16_of_e4m3(pairs[3], codes.w);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto &low = pairs[2 * half], &high = pairs[2 * half + 1];
    *reinterpret_cast<uint4*>(tile + Plan::place(row, 2 * i + half)) =
        uint4{low[0], low[1], high[0], high[1]};
  }
}

// Decodes the codes that this thread has copied, which have arrived.
template <typename Plan>
__device__ void decode_codes(ChunkShared<Plan>& shared) {
  using Codes = CodeVector<Plan>;
  const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * Plan::kWarpKeys;
  if (lane >= Codes::kLanes) return;
  const Codes own = Codes::of(lane);
  uint4 keys[Codes::kSteps], values[Codes::kSteps];
#pragma unroll
  for (int step = 0; step < Codes::kSteps; ++step) {
    keys[step] = shared.key_codes()[Codes::place(step)];
    values[step] = shared.value_codes()[Codes::place(step)];
  }
#pragma unroll
  for (int step = 0; step < Codes::kSteps; ++step) {
    const int row = first_key + step * Codes::kRows + own.row;
    decode_vector<Plan>(shared.keys(0), row, own.vector, keys[step]);
    decode_vector<Plan>(shared.values(0), row, own.vector, values[step]);
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

// The same of values in fp8, whose codes are finite. A scale that is not is that of all dims. Each
// thread checks the scale that it has copied.
template <typename Plan>
__device__ void hide_scales(TileScales<kTileKeys>& scales, int32_t first_position,
                            int32_t* poisoned) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane >= Plan::kWarpKeys) return;
  const int key = threadIdx.x / kWarpSize * Plan::kWarpKeys + lane;
  if (fabsf(scales.values[key]) < INFINITY) return;
  scales.values[key] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < Plan::kHeadDim; ++d) atomicMin(poisoned + d, first_position + key);
}

}  // namespace photon::cuda
