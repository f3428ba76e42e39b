// Split attention of many tokens: a CTA is one warp, which takes whole steps alone. Of many tokens
// there are work items enough to fill every SM with such warps. None waits for another one, and
// what the four warps of a CTA of split_attention.cu each work out is worked out once: a context of
// 220 positions takes 7,400 instructions of one warp here, and 18,400 of four there. The splits,
// the tiles and the order of every sum are the same, and so are the bits. The rules of a chain are
// those of split_attention.cu, too.
#include "cuda/warp_attention.h"

#include "cuda/launch.cuh"
#include "cuda/split_launch.cuh"
#include "cuda/warp_queries.cuh"
#include "cuda/warp_results.cuh"

namespace photon::cuda {
namespace {

// From so many on there are work items enough. With fewer tokens a warp's own latency shows: 64 of
// 220 positions took 27.1 us, and 24.7 by four warps a CTA (benchmarks/FINDINGS.md).
constexpr int kManyTokens = 97;
// Two for each scheduler. With three there are 168 registers, and 104 bytes of a thread in local
// memory, for which L1 has no room beside this much shared memory: 93 us for 69.
constexpr int kSmWarps = 8;
constexpr int kSlackTokens = 64;

// A warp's tile ranges, one after the other.
template <int kHeadDim>
class LoneWarp {
 public:
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  __device__ LoneWarp(const RopeParams& rope, float scale, const SplitGrid& grid,
                      const Partials& partials, const CtaRanges<true>& ranges,
                      TileLoader<kHeadDim>& loader, Shared& shared)
      : rope_(rope),
        scale_log2_(scale * kLog2E),
        grid_(grid),
        partials_(partials),
        ranges_(ranges),
        loader_(loader),
        shared_(shared) {}

  __device__ void attend() {
    start_copies();
#pragma unroll 1
    for (int number = 0;; ++number) {
      const RangeCursor& range = shared_.ranges[number % Shared::kRanges];
      if (!range.has_range(grid_)) break;
      attend_range(range);
      __syncwarp();  // all lanes are done with the tile range and with what has been kept
    }
  }

 private:
  __device__ void start_copies() {
    loader_.advance();
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      if (loader_.is_loaded(tile)) loader_.request_keys(tile);
    }
  }

  __device__ void attend_range(const RangeCursor& range) {
    const bool is_live = queries_.prepare(rope_, grid_, range, shared_);
    const int warps = ranges_.ranges_of(range);
    new_position_ = range.new_position();
    steps_ = range.steps(grid_);
    sums_.part.clear();
    const WarpResults<kHeadDim> results(grid_, partials_, range, is_live, shared_);
#pragma unroll 1
    do {
      attend_step();
      const int split = steps_.split;
      if (!steps_.advance(Shape::kStepTokens)) continue;
      if (warps > 1) {
        results.leave(sums_, split);
      } else {
        if (split != range.split) results.add_to_kept(sums_);
        if (steps_.is_done()) {
          results.write(sums_);
        } else {
          results.keep(sums_);
        }
      }
      sums_.part.clear();
    } while (!steps_.is_done());
    if (warps > 1 && results.is_last_to_arrive(warps)) results.merge();
  }

  // When keys have been used, the values of the same positions are requested in their place; and
  // then the keys of the next step, perhaps of another tile range, in the place of values.
  __device__ void attend_step() {
    const uint32_t loaded = loader_.loaded();
    StepWeights<kHeadDim> weights;
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      weights.leave_out(tile);
      if ((loaded >> tile & 1) == 0) continue;
      score_tile(weights, tile);
      __syncwarp();  // all lanes have read the keys
      loader_.request_values(tile);
    }
    loader_.advance();
    if (loader_.is_done()) let_next_start();
    sums_.raise_high(weights);
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      if ((loaded >> tile & 1) != 0) {
        add_tile(weights, tile);
        __syncwarp();  // all lanes have read the values
      }
      if (loader_.is_loaded(tile)) loader_.request_keys(tile);
    }
  }

  __device__ void score_tile(StepWeights<kHeadDim>& weights, int tile) {
    unsigned char* const keys = shared_.tiles[tile];
    wait_barrier(&shared_.full[tile], 0);
    if (has_new(tile)) {
      put_row<kHeadDim>(keys, new_token(tile), shared_.new_k);
      fence_async_shared();
      __syncwarp();
    }
    weights.weigh(tile, queries_, keys, (1u << tile_tokens(tile)) - 1, scale_log2_);
  }

  __device__ void add_tile(const StepWeights<kHeadDim>& weights, int tile) {
    unsigned char* const values = shared_.tiles[tile];
    wait_barrier(&shared_.full[tile], 1);
    if (tile_tokens(tile) < kTileTokens || has_new(tile)) {
      clear_rows<kHeadDim>(values, tile_tokens(tile));
      if (has_new(tile)) put_row<kHeadDim>(values, new_token(tile), shared_.new_v);
      fence_async_shared();
      __syncwarp();
    }
    sums_.add_tile(weights, tile, values);
  }

  // Of a tile of the step: how many positions are in the tile range, where in the tile the new one
  // is, and whether it is.
  __device__ int tile_tokens(int tile) const {
    return min(steps_.end - (steps_.at + tile * kTileTokens), kTileTokens);
  }
  __device__ unsigned new_token(int tile) const {
    return new_position_ - (steps_.at + tile * kTileTokens);
  }
  __device__ bool has_new(int tile) const { return new_token(tile) < kTileTokens; }

  const RopeParams& rope_;
  const float scale_log2_;
  const SplitGrid& grid_;
  const Partials& partials_;
  const CtaRanges<true>& ranges_;
  TileLoader<kHeadDim>& loader_;
  Shared& shared_;
  WarpQueries<kHeadDim> queries_ = {};
  WarpSums<kHeadDim> sums_;
  RangeSteps steps_ = {};
  int32_t new_position_ = -1;
};

template <int kHeadDim>
__global__ void __launch_bounds__(kWarpSize, kSmWarps)
    warp_attention_kernel(const __grid_constant__ RopeParams rope, const float scale,
                          const __grid_constant__ SplitGrid grid,
                          const __grid_constant__ Partials partials,
                          const __grid_constant__ TileTensors tensors) {
  if constexpr (!kHopperCode) return;
  auto& shared = *reinterpret_cast<WarpShared<kHeadDim>*>(dynamic_shared());
  shared.open(tensors);
  TokenCut own;
  const CtaSplits share = CtaSplits::of_cta<true>(grid, own);
  CtaRanges<true>::make_order(grid, share, shared.order);
  const CtaRanges<true> ranges(grid, share, shared.order);
  TileLoader<kHeadDim> loader(grid, tensors, ranges, ranges.first(own), shared);
  LoneWarp<kHeadDim>(rope, scale, grid, partials, ranges, loader, shared).attend();
  wait_for_earlier();  // also without work: see split_attention.cu
  if (share.has_dead) clear_dead_tokens<kHeadDim>(grid);
}

template <int kHeadDim>
int launch_warps(const FusedAttentionDecodeParams& p, void* stream) {
  static_assert(kSmWarps * (sizeof(WarpShared<kHeadDim>) + kReservedBytes) <= kSmBytes);
  TileTensors tensors(p.cache);
  if (const int error = tensors.make_maps<kHeadDim>(p.cache)) return error;
  LaunchShape shape{sms() * kSmWarps, kWarpSize};
  shape.shared_bytes = sizeof(WarpShared<kHeadDim>);
  shape.pdl = p.pdl;
  const auto kernel = warp_attention_kernel<kHeadDim>;
  if (const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributePreferredSharedMemoryCarveout, 100);
      error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would find it
    return error;
  }
  const Division division = {shape.blocks, 0, 1, WarpShape<kHeadDim>::kItemBits, kSlackTokens};
  return launch(kernel, shape, stream, p.rope, p.scale, make_split_grid(p, division),
                partials_in(p), tensors);
}

}  // namespace

bool warp_attention_fits(const FusedAttentionDecodeParams& p) {
  return p.tokens >= kManyTokens && p.head_dim == 128 &&
         p.q_heads <= WarpShared<128>::kQueries * p.kv_heads &&
         (p.cache.page_table == nullptr || p.cache.page_size % kTileTokens == 0) &&
         TileTensors::fit(p.cache, p.kv_heads);
}

int warp_attention(const FusedAttentionDecodeParams& p, void* stream) {
  return launch_warps<128>(p, stream);
}

}  // namespace photon::cuda
