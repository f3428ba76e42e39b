// Reduction of the parts of a context: each CTA of the cluster leaves what it has summed in its own
// shared memory; then every CTA takes some of the rows and adds up their parts, in order, which it
// reads from all CTAs.
#pragma once
#include "cuda/attention/chunk_tile.cuh"

namespace photon::cuda {

// A row's sum of weights, relative to its highest score: for each of the four lanes that share it.
template <typename Plan>
__device__ float total_of(const RowSoftmax<Plan>& state, int fragment, int half) {
  float total = state.total[fragment][half];
  total += __shfl_xor_sync(kFullWarp, total, 1);
  return total + __shfl_xor_sync(kFullWarp, total, 2);
}

// Leaves the CTA's part of the run where the tiles of keys and values were. All threads must call
// it.
template <typename Plan>
__device__ void leave_part(ChunkShared<Plan>& shared, const RowSoftmax<Plan>& state) {
  const int pair = threadIdx.x % 4 * 2;
  __syncthreads();  // all have read the last tile
#pragma unroll
  for (int f = 0; f < Plan::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row<Plan>(f) + half * 8;
      const float total = total_of(state, f, half);
      if (pair == 0) shared.weights[row] = {state.high[f][half], total};
#pragma unroll
      for (int n = 0; n < Plan::kColumns; ++n) {
        const float2 sums = {state.sum[f][n][2 * half], state.sum[f][n][2 * half + 1]};
        *reinterpret_cast<float2*>(shared.sums() + Plan::sum_place(row, n) + pair) = sums;
      }
    }
  }
}

// How a warp's lanes divide the reduction: kPartLanes lanes have the parts of one of the warp's
// kMergeRows rows.
constexpr int kPartLanes = 8, kMergeRows = kWarpSize / kPartLanes;
static_assert(kParts <= kPartLanes);

// What a lane's part of its row counts for, and the inverse of what all parts of the row weigh
// together.
struct PartWeight {
  float keep, inverse;
};

// Lanes without a part bring -inf and 0, which change no bit of the others'.
__device__ inline PartWeight weigh_part(float2 part, float scale) {
  const float high = part.x;
  float top = high;
#pragma unroll
  for (int offset = 1; offset < kPartLanes; offset *= 2)
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
  const float base = top == -INFINITY ? 0.0f : top * scale;
  const float keep = high == top ? 1.0f : exp2f(fmaf(high, scale, -base));
  float total = fmaf(part.y, keep, 0.0f);
#pragma unroll
  for (int offset = 1; offset < kPartLanes; offset *= 2)
    total += __shfl_xor_sync(kFullWarp, total, offset);
  return {keep, total == 0.0f ? 0.0f : 1.0f / total};
}

// Writes this warp's share of the run's rows. All CTAs must have left their parts, and stay until
// their neighbours have read them.
template <typename Plan>
__device__ void merge_rows(const PagedAttentionParams& p, const ChunkShared<Plan>& shared) {
  constexpr int kQuads = Plan::kHeadDim / 4;
  static_assert(kMergeRows * kQuads % kWarpSize == 0 && Plan::kRows % kMergeRows == 0);
  const ChunkTask task = shared.task;
  const Run run = shared.run;
  const float scale = p.scale * kLog2E;
  const int lane = threadIdx.x % kWarpSize,
            warp = Plan::rank() * Plan::kWarps + threadIdx.x / kWarpSize;
  for (int first = warp * kMergeRows; first < Plan::kRows;
       first += kParts * Plan::kWarps * kMergeRows) {
    const int own_row = first + lane / kPartLanes, part = lane % kPartLanes;
    const bool present = part < kParts && run.has(own_row / task.group);
    const PartWeight weight = weigh_part(
        present ? load_from_block(shared.weights + own_row, part) : float2{-INFINITY, 0.0f}, scale);
#pragma unroll
    for (int step = 0; step < kMergeRows * kQuads; step += kWarpSize) {
      const int slot = (step + lane) / kQuads, quad = (step + lane) % kQuads, row = first + slot;
      const bool valid = run.has(row / task.group);
      const float4* at = reinterpret_cast<const float4*>(
          shared.sums() + Plan::sum_place(row, quad / 2) + quad % 2 * 4);
      float4 parts[kParts];
#pragma unroll
      for (int k = 0; k < kParts; ++k) parts[k] = valid ? load_from_block(at, k) : float4{};
      float sum[4] = {};
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const float keep = __shfl_sync(kFullWarp, weight.keep, slot * kPartLanes + k);
        sum[0] = fmaf(parts[k].x, keep, sum[0]);
        sum[1] = fmaf(parts[k].y, keep, sum[1]);
        sum[2] = fmaf(parts[k].z, keep, sum[2]);
        sum[3] = fmaf(parts[k].w, keep, sum[3]);
      }
      const float inverse = __shfl_sync(kFullWarp, weight.inverse, slot * kPartLanes);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = fmaf(sum[e], inverse, 0.0f);
      Bf16* out =
          static_cast<Bf16*>(p.out) + task.offset(row, p.out_stride, p.out_head_stride) + quad * 4;
      if (valid)
        *reinterpret_cast<uint2*>(out) =
            uint2{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3])};
    }
  }
}

// Adds up the parts of the run. All threads of the cluster must call it.
template <typename Plan>
__device__ void reduce_parts(const PagedAttentionParams& p, ChunkShared<Plan>& shared,
                             const RowSoftmax<Plan>& state) {
  if constexpr (kHopperCode) {
    leave_part(shared, state);
    sync_cluster();
    merge_rows(p, shared);
    sync_cluster();  // the neighbours have read what this CTA left
  }
}

}  // namespace photon::cuda
