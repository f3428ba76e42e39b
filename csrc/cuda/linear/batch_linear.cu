// The linears of a batch of tokens, of dense weights: their kernels and launches.
#include "cuda/linear/batch_copies.cuh"
#include "cuda/linear/batch_launch.cuh"

namespace photon::cuda {
namespace batch {
namespace {

// Registers of a thread, at most: where an SM is to hold a CTA of the next kernel beside this one,
// about half of what there is.
template <int kBlocks, int kRows>
constexpr int kRegisters = kRows > 160                   ? 168
                           : kBlocks == 1 || kRows > 128 ? 128
                           : kRows > 96                  ? 112
                                                         : 96;

template <int kBlocks, int kRows, Finish kFinish>
struct DenseFeed : CopyFeed<kBlocks, kRows, kFinish> {
  using Params = batch::Params;
  using CopyFeed<kBlocks, kRows, kFinish>::CopyFeed;

  __device__ void multiply(int group, float (&sums)[kRows / 2]) const {
    batch::multiply(this->p, this->tile, this->rings, group, sums);
  }
};

template <int kBlocks, int kRows, Finish kFinish>
__global__ void __maxnreg__((kRegisters<kBlocks, kRows>))
    batch_kernel(const __grid_constant__ Params p) {
  if constexpr (kHasBody) run_block<kBlocks, kRows, kFinish, DenseFeed>(p);
}

struct Dense {
  static constexpr int kColumns = kKBlockColumns;
  template <int kBlocks, int kRows, Finish kFinish>
  using Feed = DenseFeed<kBlocks, kRows, kFinish>;
  template <int kBlocks, int kRows, Finish kFinish>
  static auto get() {
    return batch_kernel<kBlocks, kRows, kFinish>;
  }

  static Plan plan(Finish finish, const LinearParams& op) {
    return batch_plan(finish, op.tokens, op.weight.n, op.weight.k / kColumns);
  }
  static Params params(const LinearParams&, const Plan&) {
    Params p{};
    p.unit = 1;
    return p;
  }
  static RowBytes rows(const LinearParams& op) {
    const Weight& w = op.weight;
    return {w.data, w.n, w.k, w.stride};
  }
  static RowBytes tokens(const LinearParams& op) { return dense_tokens(op); }
};

}  // namespace
}  // namespace batch

int run_batch_linear(const LinearParams& p, void* stream) {
  return batch::launch_linear<batch::Dense>(p, stream);
}

}  // namespace photon::cuda
