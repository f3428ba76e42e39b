// What stands in front of the linears for many tokens where x is normalized: x times the gains, and
// of each token one over its root mean square, in the bits of the kernels that do this themselves.
//
// A CTA has eight tokens. Of each chunk warp w takes slice w, of all tokens; at the end the slices'
// sums of squares are added in order.
#pragma once
#include "cuda/linear/stream_common.cuh"

namespace photon::cuda::stream_linear::tall {

constexpr int kNormThreads = kSlices * kWarpSize;

struct NormParams {
  const Bf16* x;  // [tokens, k]
  const Bf16* gain;
  const int32_t* counts;
  Bf16* normed;  // [tokens, k], contiguous
  float* scale;  // [tokens]
  int64_t x_stride;
  int tokens, k;
  float eps, per_column;
};

__device__ inline void normalize_tokens(const NormParams& p) {
  __shared__ float squares[kSlices][kTokenTile];
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  wait_for_earlier();
  const int first = static_cast<int>(blockIdx.x) * kTokenTile;
  if (first >= active) return;
  const LaneVectors at;
  const int slice = threadIdx.x / kWarpSize, token = first + at.group;
  const bool is_live = token < active;
  const Bf16* const from = p.x + (is_live ? token : first) * p.x_stride;
  Bf16* const to = p.normed + static_cast<int64_t>(token) * p.k;
  float sums[2] = {};
#pragma unroll 4
  for (int column = slice * kSliceColumns; column < p.k; column += kChunk) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int own = column + at.column(half);
      uint4 v = load_fresh_if(is_live, reinterpret_cast<const uint4*>(from + own));
      normalize(v, *reinterpret_cast<const uint4*>(p.gain + own), sums);
      if (is_live) *reinterpret_cast<uint4*>(to + own) = v;
    }
  }
  if (at.group / 2 == at.thread) squares[slice][at.group] = at.group % 2 == 0 ? sums[0] : sums[1];
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x);
  if (own >= kTokenTile || first + own >= active) return;
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSlices; ++s) sum += squares[s][own];
  p.scale[first + own] = rsqrtf(fmaf(sum, p.per_column, p.eps));
}

}  // namespace photon::cuda::stream_linear::tall
