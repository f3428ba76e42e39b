// sum_norm: what stands behind a linear of a batch that leaves the sums of each part of the columns
// (batch_linear.cuh). It adds them up, adds the rounded output to the residual, and normalizes that
// as add_rms_norm does. One CTA for each token.
#include <algorithm>

#include "cuda/fresh_pack.cuh"
#include "cuda/linear/batch_launch.cuh"
#include "cuda/linear/norm.cuh"
#include "cuda/linear/quantize.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace batch {

// Of a CTA, and of a thread: so there is room beside a CTA of a dense linear.
constexpr int kMostSumThreads = 512, kSumRegisters = 72;

struct SumNormParams {
  void* normed;                      // [tokens, n]; of bfloat16, or with scales e4m3 bytes
  float* scales;                     // [tokens] or null
  __nv_bfloat16* residual;           // [tokens, n]: added to
  const float* partial;              // [splits, tokens, n]
  const __nv_bfloat16 *bias, *gain;  // [n]; bias: or null
  const int32_t* counts;
  int64_t normed_stride, residual_stride;
  int tokens, n, splits;
  float eps;
};

using BfPack = Pack<__nv_bfloat16>;

// Eight columns of a token: bias, then all parts in order. All are requested at once.
__device__ inline void add_parts(const SumNormParams& p, int token, int column,
                                 float (&sums)[kPack]) {
  const float* const from = p.partial + static_cast<int64_t>(token) * p.n + column;
  const int64_t part_values = static_cast<int64_t>(p.tokens) * p.n;
  uint4 parts[kBatchSplits][2];
#pragma unroll
  for (int i = 0; i < kBatchSplits; ++i) {
    const bool is_part = i < p.splits;
    const uint4* const at = reinterpret_cast<const uint4*>(from + (is_part ? i : 0) * part_values);
    parts[i][0] = load_fresh_if(is_part, at);
    parts[i][1] = load_fresh_if(is_part, at + 1);
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) sums[j] = p.bias != nullptr ? to_float(p.bias[column + j]) : 0.0f;
#pragma unroll
  for (const auto& [low, high] : parts) {
    const uint32_t words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums[j] += __uint_as_float(words[j]);
  }
}

// A token of which each thread has these packs.
template <int kPacks>
__device__ void store_fp8(const SumNormParams& p, int token, const BfPack (&packs)[kPacks],
                          uint32_t* most) {
  const int first = static_cast<int>(threadIdx.x) * kPack,
            step = static_cast<int>(blockDim.x) * kPack;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (first + i * step < p.n) largest = max(largest, largest_of(packs[i]));
  }
  const float scale = e4m3_scale(block_largest(largest, most));
  if (threadIdx.x == 0) p.scales[token] = scale;
  uint8_t* const out = static_cast<uint8_t*>(p.normed) + token * p.normed_stride;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = first + i * step;
    if (column < p.n) store_codes<true>(out + column, packs[i], scale, kPack);
  }
}

// kPacks: of a thread. kFp8: what is normalized is left as quantize_fp8_into leaves it.
template <int kPacks, bool kFp8>
__device__ void sum_and_normalize(const SumNormParams& p) {
  __shared__ float warps[kWarpSize];
  __shared__ uint32_t most[kWarpSize];
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  const int token = static_cast<int>(blockIdx.x), step = static_cast<int>(blockDim.x) * kPack;
  const int first = static_cast<int>(threadIdx.x) * kPack;
  BfPack gains[kPacks], packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
    gains[i] = load_pack<true>(p.gain + first + i * step, p.n - first - i * step);
  wait_for_earlier();
  if (token >= active) return;
  __nv_bfloat16* const residual = p.residual + token * p.residual_stride;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = first + i * step;
    if (column >= p.n) continue;
    packs[i] = load_fresh_pack<true>(residual + column, kPack);
    float sums[kPack];
    add_parts(p, token, column, sums);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      packs[i].e[j] =
          from_float<__nv_bfloat16>(to_float(packs[i].e[j]) + rounded<__nv_bfloat16>(sums[j]));
      squares = fmaf(to_float(packs[i].e[j]), to_float(packs[i].e[j]), squares);
    }
    store_pack<true>(residual + column, packs[i], kPack);
  }
  const float scale = norm_scale(block_sum(squares, warps), p.n, p.eps);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (first + i * step < p.n) packs[i] = normalized(packs[i], gains[i], scale);
  }
  if constexpr (kFp8) {
    store_fp8(p, token, packs, most);
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int column = first + i * step;
      if (column < p.n)
        store_pack<true>(static_cast<Bf16*>(p.normed) + token * p.normed_stride + column, packs[i],
                         kPack);
    }
  }
}

namespace {

template <int kPacks, bool kFp8>
__global__ void __maxnreg__(kSumRegisters) sum_norm_kernel(const SumNormParams p) {
  if constexpr (kHasBody) sum_and_normalize<kPacks, kFp8>(p);
}

template <bool kFp8>
int launch_sum_norm(const SumNormParams& p, void* stream) {
  LaunchShape shape{at_least_all_sms(p.tokens), std::min(norm_threads(p.n), kMostSumThreads)};
  shape.pdl = true;
  const int64_t packs = ceil_div(p.n, int64_t{kMostSumThreads} * kPack);
  return launch(packs > 2   ? sum_norm_kernel<4, kFp8>
                : packs > 1 ? sum_norm_kernel<2, kFp8>
                            : sum_norm_kernel<1, kFp8>,
                shape, stream, p);
}

}  // namespace
}  // namespace batch

// It may always start early: when it runs, all before the linear has ended, or that was allowed to
// start early itself.
int run_sum_norm(const LinearParams& op, int splits, void* stream) {
  const batch::SumNormParams p = {op.out,
                                  op.out_scales,
                                  static_cast<Bf16*>(op.residual),
                                  op.workspace,
                                  static_cast<const Bf16*>(op.bias),
                                  static_cast<const Bf16*>(op.norm_weight),
                                  op.counts,
                                  op.out_stride,
                                  op.residual_stride,
                                  static_cast<int>(op.tokens),
                                  static_cast<int>(op.weight.n),
                                  splits,
                                  op.eps};
  return op.out_scales == nullptr ? batch::launch_sum_norm<false>(p, stream)
                                  : batch::launch_sum_norm<true>(p, stream);
}

}  // namespace photon::cuda
