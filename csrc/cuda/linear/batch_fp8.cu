// The linears of a batch of tokens, of weights and tokens in fp8: their kernels and launches.
#include "cuda/linear/batch_fp8.cuh"

#include "cuda/linear/batch_launch.cuh"

namespace photon::cuda {
namespace batch {
namespace {

template <int kBlocks, int kRows, Finish kFinish>
__global__ void __maxnreg__((Fp8Feed<kBlocks, kRows, kFinish>::kRegisters))
    batch_fp8_kernel(const __grid_constant__ Fp8Params p) {
  if constexpr (kHasBody) run_block<kBlocks, kRows, kFinish, Fp8Feed>(p);
}

struct Fp8 {
  static constexpr int kColumns = kFp8Columns;
  template <int kBlocks, int kRows, Finish kFinish>
  using Feed = Fp8Feed<kBlocks, kRows, kFinish>;
  template <int kBlocks, int kRows, Finish kFinish>
  static auto get() {
    return batch_fp8_kernel<kBlocks, kRows, kFinish>;
  }

  static Plan plan(Finish finish, const LinearParams& op) {
    return batch_plan(finish, op.tokens, op.weight.n, op.weight.k / kColumns);
  }
  static Fp8Params params(const LinearParams& op, const Plan&) {
    Fp8Params p{};
    p.unit = 1;
    const WeightScales& scales = op.weight.scales;
    (scales.rows == 1 ? p.row_scales : p.block_scales) = static_cast<const float*>(scales.data);
    p.x_scales = op.x_scales;
    return p;
  }
  static RowBytes rows(const LinearParams& op) {
    const Weight& w = op.weight;
    return {w.data, w.n, w.k / 2, w.stride / 2};
  }
  static RowBytes tokens(const LinearParams& op) {
    return {op.x, op.tokens, op.weight.k / 2, op.x_stride / 2};
  }
};

}  // namespace
}  // namespace batch

int run_batch_fp8(const LinearParams& p, void* stream) {
  return batch::launch_linear<batch::Fp8>(p, stream);
}

}  // namespace photon::cuda
