// The linears of a batch of tokens, of weights of fewer bits: their kernels and launches.
#include "cuda/linear/batch_stored.cuh"

#include "common/block_layout.h"
#include "cuda/linear/batch_launch.cuh"

namespace photon::cuda {
namespace batch {
namespace {

template <int kBlocks, int kRows, Finish kFinish>
__global__ void __maxnreg__((StoredFeed<kBlocks, kRows, kFinish>::kRegisters))
    batch_stored_kernel(const __grid_constant__ StoredParams p) {
  if constexpr (kHasBody) run_block<kBlocks, kRows, kFinish, StoredFeed>(p);
}

Scales scales_of(const Weight& w) {
  const WeightScales& s = w.scales;
  Scales scales{};
  scales.data = s.data;
  scales.zeros = s.zeros;
  scales.offsets = s.offsets;
  scales.row_shift = log2_of(s.rows);
  scales.column_shift = s.columns >= w.k ? kOneGroup : log2_of(s.columns);
  scales.row_groups = static_cast<int>(ceil_div(w.k, s.columns));
  scales.is_half = s.dtype == DType::kF16;
  return scales;
}

// K blocks of 128 bytes of a row.
int blocks_of_stage(const Weight& w) {
  const auto [columns, bytes] = block_layout(w.format);
  return static_cast<int>(kBatchRowBytes * columns / bytes / kKBlockColumns);
}

struct Stored {
  static constexpr int kColumns = kKBlockColumns;
  template <int kBlocks, int kRows, Finish kFinish>
  using Feed = StoredFeed<kBlocks, kRows, kFinish>;
  template <int kBlocks, int kRows, Finish kFinish>
  static auto get() {
    return batch_stored_kernel<kBlocks, kRows, kFinish>;
  }

  static Plan plan(Finish finish, const LinearParams& op) {
    const Weight& w = op.weight;
    return stored_batch_plan(finish, op.tokens, w.n, w.k / kKBlockColumns, blocks_of_stage(w));
  }
  static StoredParams params(const LinearParams& op, const Plan& plan) {
    StoredParams p{};
    p.unit = blocks_of_stage(op.weight);
    p.scales = scales_of(op.weight);
    p.stored_stages = plan.stored_stages;
    p.format = op.weight.format;
    return p;
  }
  static RowBytes rows(const LinearParams& op) {
    const Weight& w = op.weight;
    const auto [columns, bytes] = block_layout(w.format);
    return {w.data, w.n, w.k / columns * bytes / 2, w.stride / 2};
  }
  static RowBytes tokens(const LinearParams& op) { return dense_tokens(op); }
};

}  // namespace
}  // namespace batch

int run_batch_stored(const LinearParams& p, void* stream) {
  return batch::launch_linear<batch::Stored>(p, stream);
}

}  // namespace photon::cuda
