// The linears of a batch of tokens: their kernels and launches.
#include "cuda/linear/batch_linear.h"

#include <algorithm>
#include <iterator>

#include "common/hopper_columns.h"
#include "cuda/linear/batch_linear.cuh"
#include "cuda/linear/sum_norm.cuh"

namespace photon::cuda {
namespace batch {
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

// Of pairs of rows, row i and row i + n, boxes of one slice of `pairs` of them, the two of each
// side by side.
int make_pair_map(HalfTileMap& map, const void* matrix, int64_t n, int64_t k, int pairs) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), 2, static_cast<cuuint64_t>(n)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(n * k) * 2,
                                static_cast<cuuint64_t>(k) * 2};  // bytes; of gate to up, of rows
  const cuuint32_t box[] = {kSliceColumns, 2, static_cast<cuuint32_t>(pairs)};
  return make_tensor_map(map, matrix, sizes, strides, box);
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

// What a launch multiplies: x [tokens, k] by the weight's rows, of which SwiGLU has 2n.
struct Operands {
  const void *x, *weight;
  int64_t k, x_stride, weight_stride;
};

template <Finish kFinish>
int launch_plan(Params p, const Plan& plan, const Operands& of, bool pdl, void* stream) {
  constexpr bool kPairs = kFinish == Finish::kSwiglu;
  const int outputs = kPairs ? plan.rows / 2 : plan.rows;
  p.steps = static_cast<int>(of.k / kSliceColumns);
  p.splits = plan.splits;
  p.x_stages = plan.x_stages;
  p.weight_stages = plan.weight_stages;
  p.token_tiles = static_cast<int>(ceil_div(p.tokens, plan.blocks * kBatchBlockTokens));
  p.row_tiles = static_cast<int>(ceil_div(p.n, outputs));
  if (const int error = make_half_tile_map(p.x, 1, of.x, p.tokens, of.k, of.x_stride,
                                           plan.blocks * kBatchBlockTokens))
    return error;
  const int error =
      kPairs ? make_pair_map(p.weight, of.weight, p.n, of.k, outputs)
             : make_half_tile_map(p.weight, 1, of.weight, p.n, of.k, of.weight_stride, plan.rows);
  if (error != 0) return error;
  return launch_rows<kFinish>(p, plan, pdl, stream);
}

template <Finish kFinish>
Plan plan_of(const Params& p, int64_t k) {
  const int64_t rows = (kFinish == Finish::kSwiglu ? 2 : 1) * static_cast<int64_t>(p.n);
  return batch_plan(kFinish, p.tokens, rows, k / kSliceColumns);
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

template <typename OpParams>
Params params_of(const OpParams& op, int64_t n) {
  Params p{};
  p.counts = op.counts;
  p.tokens = static_cast<int>(op.tokens);
  p.n = static_cast<int>(n);
  return p;
}

constexpr int64_t kMostSize = INT32_MAX / 2 - 256;  // of tokens and outputs

const char* misfit(DType dtype, int64_t tokens, int64_t n, int64_t k) {
  if (const char* device = hopper_device_misfit()) return device;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9)
    return "the device's compute capability is not 9.0";
  if (dtype != DType::kBF16) return "the dtype is not bfloat16";
  if (const char* columns = hopper_columns_misfit(k, /*normalizes=*/false)) return columns;
  if (n % kPack != 0) return "the number of outputs is no multiple of 8";
  return tokens <= kMostSize && n <= kMostSize ? nullptr : "sizes are beyond what 32 bits index";
}

// The pointers and row strides of what is read and written in vectors.
template <typename... Pointers>
bool are_aligned(Pointers... pointers) {
  return (is_vector_aligned(pointers) && ...);
}
template <typename... Strides>
bool are_strides(Strides... strides) {
  return are_whole_vectors(DType::kBF16, strides...) && ((strides > 0) && ...);
}

constexpr const char* kMisaligned = "a pointer or a row stride is no multiple of 16 bytes";

}  // namespace
}  // namespace batch

const char* batch_misfit(const LinearParams& p) {
  if (const char* why = batch::misfit(p.dtype, p.tokens, p.n, p.k)) return why;
  return batch::are_aligned(p.out, p.x, p.weight) &&
                 batch::are_strides(p.out_stride, p.x_stride, p.weight_stride)
             ? nullptr
             : batch::kMisaligned;
}

const char* batch_misfit(const SwigluParams& p) {
  if (const char* why = batch::misfit(p.dtype, p.tokens, p.intermediate, p.hidden)) return why;
  return batch::are_aligned(p.out, p.x, p.weight) && batch::are_strides(p.out_stride, p.x_stride)
             ? nullptr
             : batch::kMisaligned;
}

const char* batch_misfit(const LinearNormParams& p) {
  if (const char* why = batch::misfit(p.dtype, p.tokens, p.n, p.k)) return why;
  if (p.n > kMaxNormColumns) return "there are more than 16384 columns to normalize";
  if (p.workspace == nullptr) return "no workspace was given";
  return batch::are_aligned(p.out, p.residual, p.x, p.weight, p.norm_weight, p.workspace) &&
                 batch::are_strides(p.out_stride, p.residual_stride, p.x_stride, p.weight_stride)
             ? nullptr
             : batch::kMisaligned;
}

int batch_linear(const LinearParams& op, void* stream) {
  batch::Params p = batch::params_of(op, op.n);
  p.out = static_cast<Bf16*>(op.out);
  p.out_stride = op.out_stride;
  p.bias = static_cast<const Bf16*>(op.bias);
  constexpr batch::Finish kFinish = batch::Finish::kOutput;
  return batch::launch_plan<kFinish>(p, batch::plan_of<kFinish>(p, op.k),
                                     {op.x, op.weight, op.k, op.x_stride, op.weight_stride}, op.pdl,
                                     stream);
}

int batch_swiglu(const SwigluParams& op, void* stream) {
  batch::Params p = batch::params_of(op, op.intermediate);
  p.out = static_cast<Bf16*>(op.out);
  p.out_stride = op.out_stride;
  p.bias = static_cast<const Bf16*>(op.bias);
  constexpr batch::Finish kFinish = batch::Finish::kSwiglu;
  return batch::launch_plan<kFinish>(p, batch::plan_of<kFinish>(p, op.hidden),
                                     {op.x, op.weight, op.hidden, op.x_stride, op.hidden}, op.pdl,
                                     stream);
}

int batch_linear_norm(const LinearNormParams& op, void* stream) {
  batch::Params p = batch::params_of(op, op.n);
  p.partial = op.workspace;
  constexpr batch::Finish kFinish = batch::Finish::kPartial;
  const batch::Plan plan = batch::plan_of<kFinish>(p, op.k);
  if (const int error = batch::launch_plan<kFinish>(
          p, plan, {op.x, op.weight, op.k, op.x_stride, op.weight_stride}, op.pdl, stream))
    return error;
  // Behind that it may always start early: when that runs, all before it has ended, or it was
  // allowed to start early itself.
  return batch::launch_sum_norm(
      {static_cast<Bf16*>(op.out), static_cast<Bf16*>(op.residual), op.workspace,
       static_cast<const Bf16*>(op.bias), static_cast<const Bf16*>(op.norm_weight), op.counts,
       op.out_stride, op.residual_stride, p.tokens, p.n, plan.splits, op.eps},
      true, stream);
}

}  // namespace photon::cuda
