// What the launches of a batch's linears share, whatever the format of the weight.
#pragma once
#include <algorithm>
#include <iterator>

#include "cuda/linear/batch_linear.cuh"
#include "cuda/linear/batch_linear.h"

namespace photon::cuda::batch {

// They are for 9.0 alone, and the emulator: elsewhere they have no body.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasBody = false;
#else
constexpr bool kHasBody = true;
#endif

// A CTA for each SM at least: those without work hold the place until the kernel before has ended,
// so that the next kernel's CTAs spread evenly, too (residency.cuh).
inline int64_t at_least_all_sms(int64_t ctas) { return std::max<int64_t>(ctas, kBatchSms); }

// A weight, or x, as tensor copies see it: rows of bfloat16, or of any bytes, two of which are
// taken for one.
struct RowBytes {
  const void* data;
  int64_t n, columns, stride;  // two bytes each
};

inline RowBytes dense_tokens(const LinearParams& op) {
  return {op.x, op.tokens, op.weight.k, op.x_stride};
}

// Of pairs of rows, row i and row i + n / 2, boxes of one K block of `pairs` of them, the two of
// each side by side.
inline int make_pair_map(RowTileMap& map, const RowBytes& w, int pairs) {
  const int64_t half = w.n / 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(w.columns), 2, static_cast<cuuint64_t>(half)};
  const cuuint64_t strides[] = {
      static_cast<cuuint64_t>(half * w.stride) * 2,
      static_cast<cuuint64_t>(w.stride) * 2};  // bytes; of gate to up, of rows
  const cuuint32_t box[] = {kKBlockColumns, 2, static_cast<cuuint32_t>(pairs)};
  return make_tensor_map(map, w.data, sizes, strides, box);
}

// `Format` has what differs: get<kBlocks, kRows, kFinish>() is a kernel, Feed what brings
// it rows and x, kColumns those of a K block, and of a call plan(finish, op), params(op), rows(op)
// and tokens(op).
template <typename Format, int kBlocks, int kRows, Finish kFinish, typename P>
int launch_kernel(const P& p, const Plan& plan, bool pdl, void* stream) {
  using Feed = typename Format::template Feed<kBlocks, kRows, kFinish>;
  LaunchShape shape{at_least_all_sms(int64_t{p.token_tiles} * p.row_tiles * p.splits),
                    kMultipliers<kBlocks> + Feed::kThreads};
  if (kExchanges<kBlocks, kFinish> && p.splits > 1) {
    shape.cluster = static_cast<unsigned>(p.splits);
    shape.blocks = ceil_div(shape.blocks, p.splits) * p.splits;
  }
  shape.shared_bytes = static_cast<size_t>(plan.shared_bytes);
  shape.pdl = pdl;
  return launch(Format::template get<kBlocks, kRows, kFinish>(), shape, stream, p);
}

template <typename Format, Finish kFinish, size_t kAt = 0, typename P>
int launch_rows(const P& p, const Plan& plan, bool pdl, void* stream) {
  if constexpr (kAt == std::size(kBatchRows)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr int kRows = kBatchRows[kAt];
    if constexpr (has_batch_rows(kFinish, kRows)) {
      if (plan.rows == kRows && plan.blocks == 1)
        return launch_kernel<Format, 1, kRows, kFinish>(p, plan, pdl, stream);
      // No plan has tiles of two blocks by fewer rows.
      if constexpr (kRows >= least_rows(kFinish, false, 2)) {
        if (plan.rows == kRows)
          return launch_kernel<Format, 2, kRows, kFinish>(p, plan, pdl, stream);
      }
    }
    return launch_rows<Format, kFinish, kAt + 1>(p, plan, pdl, stream);
  }
}

template <typename Format, Finish kFinish>
int launch_plan(const Plan& plan, const LinearParams& op, void* stream) {
  constexpr bool kPairs = kFinish == Finish::kSwiglu;
  const int outputs = kPairs ? plan.rows / 2 : plan.rows;
  auto p = Format::params(op, plan);
  p.counts = op.counts;
  p.tokens = static_cast<int>(op.tokens);
  p.n = static_cast<int>(op.outputs());
  if constexpr (kFinish == Finish::kPartial) {
    p.partial = op.workspace;
  } else {
    p.out = static_cast<Bf16*>(op.out);
    p.out_stride = op.out_stride;
    p.bias = static_cast<const Bf16*>(op.bias);
  }
  p.steps = static_cast<int>(op.weight.k / Format::kColumns);
  p.splits = plan.splits;
  p.x_stages = plan.x_stages;
  p.weight_stages = plan.weight_stages;
  p.token_tiles = static_cast<int>(ceil_div(p.tokens, plan.blocks * kBatchBlockTokens));
  p.row_tiles = static_cast<int>(ceil_div(p.n, outputs));
  const RowBytes x = Format::tokens(op), rows = Format::rows(op);
  if (const int error = make_row_tile_map(p.x, 1, x.data, x.n, x.columns, x.stride,
                                          plan.blocks * kBatchBlockTokens))
    return error;
  const int error = kPairs ? make_pair_map(p.weight, rows, outputs)
                           : make_row_tile_map(p.weight, 1, rows.data, rows.n, rows.columns,
                                               rows.stride, plan.rows);
  if (error != 0) return error;
  return launch_rows<Format, kFinish>(p, plan, op.pdl, stream);
}

template <typename Format, Finish kFinish>
int launch_finish(const LinearParams& op, void* stream) {
  const Plan plan = Format::plan(kFinish, op);
  const int error = launch_plan<Format, kFinish>(plan, op, stream);
  if (error != 0 || kFinish != Finish::kPartial) return error;
  return run_sum_norm(op, plan.splits, stream);
}

template <typename Format>
int launch_linear(const LinearParams& op, void* stream) {
  switch (op.epilogue) {
    case Epilogue::kStore:
      return launch_finish<Format, Finish::kOutput>(op, stream);
    case Epilogue::kSwiglu:
      return launch_finish<Format, Finish::kSwiglu>(op, stream);
    case Epilogue::kAddNorm:
      return launch_finish<Format, Finish::kPartial>(op, stream);
    default:
      return cudaErrorInvalidValue;  // plan_linear() chooses others
  }
}

}  // namespace photon::cuda::batch
