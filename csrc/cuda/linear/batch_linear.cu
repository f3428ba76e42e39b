// The linears of a batch of tokens, of dense weights: their kernels and launches.
#include "cuda/linear/batch_launch.cuh"

namespace photon::cuda {
namespace batch {

// One warp fills both rings. A step that has been multiplied leaves its place in both, so one
// barrier tells of it.
template <int kBlocks, int kRows, Finish kFinish>
struct DenseFeed {
  using Params = batch::Params;
  using R = Rings<kBlocks, kRows>;
  static constexpr int kThreads = kWarpSize;  // besides those that multiply
  static constexpr int kFillers = 1;          // arrivals that fill a stage of rows

  const Params& p;
  const Tile& tile;
  const R rings;

  __device__ DenseFeed(const Params& p, const Tile& tile, unsigned char* shared)
      : p(p), tile(tile), rings(p, shared) {}
  __device__ void init() const {}
  __device__ void begin_multiplying() const {}

  // All lanes. Rows at once: no kernel before this one writes them.
  __device__ void run(int) const {
    const uint64_t weight_policy = evict_first(), x_policy = evict_last();
    Stage x_at, weight_at;
    for (int i = 0; i < min(p.weight_stages, tile.steps); ++i)
      copy_rows(i, weight_at, weight_policy);
    wait_for_earlier();
    fence_async_global();
    for (int i = 0; i < min(p.x_stages, tile.steps); ++i) copy_tokens(i, x_at, x_policy);
#pragma unroll 1
    for (int i = 0; i + min(p.x_stages, p.weight_stages) < tile.steps; ++i) {
      wait_barrier(&rings.empty[i % kBatchMaxStages], i / kBatchMaxStages % 2);
      if (i + p.x_stages < tile.steps) copy_tokens(i + p.x_stages, x_at, x_policy);
      if (i + p.weight_stages < tile.steps)
        copy_rows(i + p.weight_stages, weight_at, weight_policy);
    }
    __syncwarp();
  }

 private:
  // A lane is elected anew for each copy: were it kept, the compiler would make a loop over lanes
  // of each.
  __device__ void copy_rows(int step, Stage& at, uint64_t policy) const {
    if (is_elected()) {
      Barrier* const full = &rings.weight_full[at.index];
      arrive_expecting(full, R::kWeightBytes);
      tensor_copy(rings.weight + at.index * R::kWeightBytes, &p.weight.map,
                  place_of_rows<kRows, kFinish>(tile.row_tile, tile.first_step + step), full,
                  policy);
    }
    at.advance(p.weight_stages);
  }

  __device__ void copy_tokens(int step, Stage& at, uint64_t policy) const {
    if (is_elected()) rings.copy_tokens(p, tile, step, at.index, policy);
    at.advance(p.x_stages);
  }
};

namespace {

// Registers of a thread, at most: where an SM is to hold a CTA of the next kernel beside this one,
// about half of what there is.
template <int kBlocks, int kRows>
constexpr int kRegisters = kRows > 160                   ? 168
                           : kBlocks == 1 || kRows > 128 ? 128
                           : kRows > 96                  ? 112
                                                         : 96;

template <int kBlocks, int kRows, Finish kFinish>
__global__ void __maxnreg__((kRegisters<kBlocks, kRows>))
    batch_kernel(const __grid_constant__ Params p) {
  if constexpr (kHasBody) run_block<kBlocks, kRows, kFinish, DenseFeed>(p);
}

struct Dense {
  template <int kBlocks, int kRows, Finish kFinish>
  using Feed = DenseFeed<kBlocks, kRows, kFinish>;
  template <int kBlocks, int kRows, Finish kFinish>
  static auto get() {
    return batch_kernel<kBlocks, kRows, kFinish>;
  }

  static Plan plan(Finish finish, const LinearParams& op) {
    return batch_plan(finish, op.tokens, op.weight.n, op.weight.k / kKBlockColumns);
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
};

}  // namespace
}  // namespace batch

int run_batch_linear(const LinearParams& p, void* stream) {
  return batch::launch_linear<batch::Dense>(p, stream);
}

}  // namespace photon::cuda
