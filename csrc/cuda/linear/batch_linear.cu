// The linears of a batch of tokens: their kernels and launches.
#include "cuda/linear/batch_linear.h"

#include <algorithm>
#include <iterator>

#include "cuda/fresh_pack.cuh"
#include "cuda/linear/batch_linear.cuh"
#include "cuda/linear/batch_plan.h"
#include "cuda/linear/norm.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace batch {

// What stands behind a linear of a batch that leaves the sums of each part of the columns
// (batch_linear.cuh): adds them up, adds the rounded output to the residual, and normalizes that as
// add_rms_norm does. One CTA for each token.

// Of a CTA, and of a thread: so there is room beside a CTA of a linear.
constexpr int kMostSumThreads = 512, kSumRegisters = 72;

struct SumNormParams {
  __nv_bfloat16* normed;             // [tokens, n]
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

// kPacks: of a thread.
template <int kPacks>
__device__ void sum_and_normalize(const SumNormParams& p) {
  __shared__ float warps[kWarpSize];
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
    const int column = first + i * step;
    if (column >= p.n) continue;
    store_pack<true>(p.normed + token * p.normed_stride + column,
                     normalized(packs[i], gains[i], scale), kPack);
  }
}
namespace {

// They are for 9.0 alone, and the emulator: elsewhere they have no body.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasBody = false;
#else
constexpr bool kHasBody = true;
#endif

template <int kBlocks, int kRows, Finish kFinish>
__global__ void __maxnreg__((kRegisters<kBlocks, kRows>))
    batch_kernel(const __grid_constant__ Params p) {
  if constexpr (kHasBody) run_block<kBlocks, kRows, kFinish>(p);
}

template <int kPacks>
__global__ void __maxnreg__(kSumRegisters) sum_norm_kernel(const SumNormParams p) {
  if constexpr (kHasBody) sum_and_normalize<kPacks>(p);
}

// A CTA for each SM at least: those without work hold the place until the kernel before has ended,
// so that the next kernel's CTAs spread evenly, too (residency.cuh).
int64_t at_least_all_sms(int64_t ctas) { return std::max<int64_t>(ctas, kBatchSms); }

// Of pairs of rows, row i and row i + n / 2, boxes of one K block of `pairs` of them, the two of
// each side by side.
int make_pair_map(RowTileMap& map, const Weight& w, int pairs) {
  const int64_t half = w.n / 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(w.k), 2, static_cast<cuuint64_t>(half)};
  const cuuint64_t strides[] = {
      static_cast<cuuint64_t>(half * w.stride) * 2,
      static_cast<cuuint64_t>(w.stride) * 2};  // bytes; of gate to up, of rows
  const cuuint32_t box[] = {kKBlockColumns, 2, static_cast<cuuint32_t>(pairs)};
  return make_tensor_map(map, w.data, sizes, strides, box);
}

template <int kBlocks, int kRows, Finish kFinish>
int launch_kernel(const Params& p, const Plan& plan, bool pdl, void* stream) {
  LaunchShape shape{at_least_all_sms(int64_t{p.token_tiles} * p.row_tiles * p.splits),
                    kThreads<kBlocks>};
  if (kExchanges<kBlocks, kFinish> && p.splits > 1) {
    shape.cluster = static_cast<unsigned>(p.splits);
    shape.blocks = ceil_div(shape.blocks, p.splits) * p.splits;
  }
  shape.shared_bytes = static_cast<size_t>(plan.shared_bytes);
  shape.pdl = pdl;
  return launch(batch_kernel<kBlocks, kRows, kFinish>, shape, stream, p);
}

template <Finish kFinish, size_t kAt = 0>
int launch_rows(const Params& p, const Plan& plan, bool pdl, void* stream) {
  if constexpr (kAt == std::size(kBatchRows)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr int kRows = kBatchRows[kAt];
    if constexpr (has_batch_rows(kFinish, kRows)) {
      if (plan.rows == kRows)
        return plan.blocks == 2 ? launch_kernel<2, kRows, kFinish>(p, plan, pdl, stream)
                                : launch_kernel<1, kRows, kFinish>(p, plan, pdl, stream);
    }
    return launch_rows<kFinish, kAt + 1>(p, plan, pdl, stream);
  }
}

template <Finish kFinish>
int launch_plan(Params p, const Plan& plan, const LinearParams& op, void* stream) {
  constexpr bool kPairs = kFinish == Finish::kSwiglu;
  const Weight& w = op.weight;
  const int outputs = kPairs ? plan.rows / 2 : plan.rows;
  p.steps = static_cast<int>(w.k / kKBlockColumns);
  p.splits = plan.splits;
  p.x_stages = plan.x_stages;
  p.weight_stages = plan.weight_stages;
  p.token_tiles = static_cast<int>(ceil_div(p.tokens, plan.blocks * kBatchBlockTokens));
  p.row_tiles = static_cast<int>(ceil_div(p.n, outputs));
  if (const int error = make_row_tile_map(p.x, 1, op.x, p.tokens, w.k, op.x_stride,
                                          plan.blocks * kBatchBlockTokens))
    return error;
  const int error = kPairs ? make_pair_map(p.weight, w, outputs)
                           : make_row_tile_map(p.weight, 1, w.data, p.n, w.k, w.stride, plan.rows);
  if (error != 0) return error;
  return launch_rows<kFinish>(p, plan, op.pdl, stream);
}

template <Finish kFinish>
Plan plan_of(const Params& p, int64_t k) {
  const int64_t rows = (kFinish == Finish::kSwiglu ? 2 : 1) * static_cast<int64_t>(p.n);
  return batch_plan(kFinish, p.tokens, rows, k / kKBlockColumns);
}

int launch_sum_norm(const SumNormParams& p, bool pdl, void* stream) {
  LaunchShape shape{at_least_all_sms(p.tokens), std::min(norm_threads(p.n), kMostSumThreads)};
  shape.pdl = pdl;
  const int64_t packs = ceil_div(p.n, int64_t{kMostSumThreads} * kPack);
  return launch(packs > 2   ? sum_norm_kernel<4>
                : packs > 1 ? sum_norm_kernel<2>
                            : sum_norm_kernel<1>,
                shape, stream, p);
}

Params params_of(const LinearParams& op) {
  Params p{};
  p.counts = op.counts;
  p.tokens = static_cast<int>(op.tokens);
  p.n = static_cast<int>(op.outputs());
  return p;
}

// Outputs, or SwiGLU of them.
template <Finish kFinish>
int launch_outputs(const LinearParams& op, void* stream) {
  Params p = params_of(op);
  p.out = static_cast<Bf16*>(op.out);
  p.out_stride = op.out_stride;
  p.bias = static_cast<const Bf16*>(op.bias);
  return launch_plan<kFinish>(p, plan_of<kFinish>(p, op.weight.k), op, stream);
}

// Sums of the parts of the columns, and what adds them up and normalizes.
int launch_add_norm(const LinearParams& op, void* stream) {
  Params p = params_of(op);
  p.partial = op.workspace;
  const Plan plan = plan_of<Finish::kPartial>(p, op.weight.k);
  if (const int error = launch_plan<Finish::kPartial>(p, plan, op, stream)) return error;
  // Behind that it may always start early: when that runs, all before it has ended, or it was
  // allowed to start early itself.
  return launch_sum_norm(
      {static_cast<Bf16*>(op.out), static_cast<Bf16*>(op.residual), op.workspace,
       static_cast<const Bf16*>(op.bias), static_cast<const Bf16*>(op.norm_weight), op.counts,
       op.out_stride, op.residual_stride, p.tokens, p.n, plan.splits, op.eps},
      true, stream);
}

}  // namespace
}  // namespace batch

int run_batch_linear(const LinearParams& p, void* stream) {
  switch (p.epilogue) {
    case Epilogue::kStore:
      return batch::launch_outputs<batch::Finish::kOutput>(p, stream);
    case Epilogue::kSwiglu:
      return batch::launch_outputs<batch::Finish::kSwiglu>(p, stream);
    case Epilogue::kAddNorm:
      return batch::launch_add_norm(p, stream);
    default:
      return cudaErrorInvalidValue;  // plan_linear() chooses others
  }
}

}  // namespace photon::cuda
