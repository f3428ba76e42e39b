// Split attention of many tokens: a CTA is one warp, which takes whole steps alone. Of many tokens
// there are work items enough to fill every SM with such warps. None waits for another one, and
// what the four warps of a CTA of split_attention.cu each work out is worked out once: a context of
// 220 positions takes 7,400 instructions of one warp here, and 18,400 of four there. The splits,
// the tiles and the order of every sum are the same, and so are the bits. The rules of a chain are
// those of split_attention.cu, too. For FusedAttentionDecodeParams::batch there is a second kernel,
// whose order of summation is one of its own (batch_sums.cuh).
#include "cuda/attention/warp_attention.h"

#include "common/attention_plan.h"
#include "cuda/attention/batch_sums.cuh"
#include "cuda/attention/one_warp_cta.cuh"
#include "cuda/attention/split_launch.cuh"
#include "cuda/attention/warp_sums.cuh"
#include "cuda/launch.cuh"

namespace photon::cuda {
namespace {

// Two for each scheduler. With three there are 168 registers, and 104 bytes of a thread in local
// memory, for which L1 has no room beside this much shared memory: 93 us for 69.
constexpr int kSmWarps = 8;
// Where the order is free a step has half the instructions, and a warp may have a longer context
// whole: 128 of 32 to 407 positions took 52 us, and 60 with the smaller slack, by which splits of
// many of them meet in the workspace (H100). Alone it reads faster than an equal division of the
// device would let it. With 1,280 it would be what 64 of 64 to 1,136 positions wait for.
constexpr int kSlackTokens = 64, kBatchSlackTokens = 640;

template <typename Sums>
__device__ void attend_by_warps(const RopeParams& rope, float scale, const SplitGrid& grid,
                                const Partials& partials, const TileTensors& tensors) {
  if constexpr (!kHopperCode) return;
  constexpr int kHeadDim = Sums::kDims;
  auto& shared = *reinterpret_cast<WarpShared<kHeadDim>*>(dynamic_shared());
  shared.open(tensors);
  TokenCut own;
  const CtaSplits cta_splits = CtaSplits::of_cta<true>(grid, own);
  CtaRanges<true>::make_order(grid, cta_splits, shared.order);
  const CtaRanges<true> ranges(grid, cta_splits, shared.order);
  TileLoader<kHeadDim> loader(grid, tensors, ranges, ranges.first(own), shared);
  OneWarpCta<Sums>(rope, scale, grid, partials, ranges, loader, shared).attend();
  wait_for_earlier();  // also without work: see split_attention.cu
  if (cta_splits.has_dead) clear_dead_tokens<kHeadDim>(grid);
}

// The order of summation of split_attention.cu.
template <int kHeadDim>
__global__ void __launch_bounds__(kWarpSize, kSmWarps)
    warp_attention_kernel(const __grid_constant__ RopeParams rope, const float scale,
                          const __grid_constant__ SplitGrid grid,
                          const __grid_constant__ Partials partials,
                          const __grid_constant__ TileTensors tensors) {
  attend_by_warps<WarpSums<kHeadDim>>(rope, scale, grid, partials, tensors);
}

// One of its own.
template <int kHeadDim>
__global__ void __launch_bounds__(kWarpSize, kSmWarps)
    batch_attention_kernel(const __grid_constant__ RopeParams rope, const float scale,
                           const __grid_constant__ SplitGrid grid,
                           const __grid_constant__ Partials partials,
                           const __grid_constant__ TileTensors tensors) {
  attend_by_warps<BatchSums<kHeadDim>>(rope, scale, grid, partials, tensors);
}

static_assert(WarpShared<kWarpHeadDim>::kQueries == kWarpSharers && kTileTokens == kCopyTokens);

template <int kHeadDim>
int launch_warps(const FusedAttentionDecodeParams& p, void* stream) {
  static_assert(kSmWarps * (sizeof(WarpShared<kHeadDim>) + kReservedBytes) <= kSmBytes);
  TileTensors tensors(p.cache);
  if (const int error = tensors.make_maps(p.cache, kHeadDim / kKBlockColumns)) return error;
  LaunchShape shape{sms() * kSmWarps, kWarpSize};
  shape.shared_bytes = sizeof(WarpShared<kHeadDim>);
  shape.pdl = p.pdl;
  const auto kernel = p.batch ? batch_attention_kernel<kHeadDim> : warp_attention_kernel<kHeadDim>;
  if (const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributePreferredSharedMemoryCarveout, 100);
      error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would find it
    return error;
  }
  const Division division = {shape.blocks, 0, 1, WarpShape<kHeadDim>::kItemBits,
                             p.batch ? kBatchSlackTokens : kSlackTokens};
  return launch(kernel, shape, stream, p.rope, p.scale, make_split_grid(p, division),
                partials_in(p), tensors);
}

}  // namespace

int warp_attention(const FusedAttentionDecodeParams& p, void* stream) {
  return launch_warps<kWarpHeadDim>(p, stream);
}

}  // namespace photon::cuda
