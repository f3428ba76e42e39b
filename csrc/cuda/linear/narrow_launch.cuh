// What the launches of the stream linears share: how rows are dealt out to CTAs, the maps of a
// weight, and the narrow kernel, of any load stage.
#pragma once
#include <algorithm>

#include "common/linear_plan.h"
#include "cuda/launch.cuh"
#include "cuda/linear/narrow_linear.cuh"
#include "cuda/residency.cuh"

namespace photon::cuda::stream_linear {

constexpr int kMaxSplitRowTiles = 8;  // of a pair of CTAs: what they exchange lies in shared memory
constexpr double kWorthSplitting = 0.9;

// Shared memory of a CTA, where an SM is to hold two of them, so that the next kernel's ring fills
// while this one works, or one.
template <Epilogue kEpilogue>
constexpr int shared_room(int residents) {
  if (residents == 1) return kOnlyBlock;
  return kEpilogue == Epilogue::kAdd ? kLargerBlock : kSmallerBlock;
}

// Which part of the SMs' time is used if `groups` of them divide `row_tiles`.
inline double balance(int64_t row_tiles, int64_t groups) {
  return static_cast<double>(row_tiles) / (groups * ceil_div(row_tiles, groups));
}

// How many split-K parts: two, unless pairs of CTAs divide the rows worse. A CTA with half of the
// columns reads half as much of x, which counts where tokens are many. The answer depends on the
// shape, the format and the device alone, and each part has a K chunk at least.
inline int choose_split(int64_t n, int64_t k, int sms, int k_chunk) {
  const int64_t row_tiles = ceil_div(n, kRowTileRows), pairs = sms / 2;
  if (pairs == 0 || k < 2 * k_chunk || ceil_div(row_tiles, pairs) > kMaxSplitRowTiles) return 1;
  return balance(row_tiles, pairs) >= kWorthSplitting * balance(row_tiles, sms) ? 2 : 1;
}

// Deals the rows out to CTAs; returns how many CTAs there are.
template <Epilogue kEpilogue>
int deal_rows(Params& p, int sms) {
  const int64_t row_tiles = ceil_div(p.n, kRowTileRows);
  const int row_blocks = std::max(sms / p.split, 1);
  p.row_tiles_each = static_cast<int>(row_tiles / row_blocks);
  p.row_tiles_extra = static_cast<int>(row_tiles % row_blocks);
  p.most_tiles =
      static_cast<int>(ceil_div(ceil_div(row_tiles, row_blocks), tile_row_tiles<kEpilogue>(p)));
  return row_blocks * p.split;
}

// `room`: bytes of shared memory that the rest of a layout leaves to the ring.
inline int fit_stages(int room, int stage_bytes) {
  return std::min(room / stage_bytes, kMaxStages);
}

// How many things a pass takes, if `all` are done in as few passes as possible of at most `most`
// each, and evenly.
inline int even_passes(int all, int most) {
  return static_cast<int>(ceil_div(all, ceil_div(all, most)));
}

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(narrow::kThreads, Size::kResidents)
    narrow_kernel(const __grid_constant__ typename Size::Load::Params p) {
  if constexpr (kHopperCode) narrow::run_block<Size, kEpilogue>(p);
}

template <typename Size, Epilogue kEpilogue>
int launch_narrow(typename Size::Load::Params p, int blocks, bool pdl, void* stream) {
  using Load = typename Size::Load;
  using Layout = narrow::Layout<Size>;
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  constexpr int kRoom = shared_room<kEpilogue>(Size::kResidents);
  constexpr int kMostPeerTiles = kMaxSplitRowTiles / kTileRowTiles;
  constexpr int kMostStageBytes = Load::kStageTiles * (Size::kTileBytes + Size::kScaleBytes);
  constexpr int kLeastStages =
      (kRoom - Layout(0, 0, kAdds ? kMostPeerTiles : 0, kMaxNormColumns, !kAdds, kAdds).end) /
      kMostStageBytes;
  static_assert(kLeastStages > Load::kLag, "a stage is filled while one after it is read");
  static_assert(
      kLeastStages * Load::kStageTiles * Size::kTileBytes >= narrow::kSlotBytes * Size::kTokens,
      "the ring has room for the sums of a tile");
  p.pass_tiles = even_passes(p.most_tiles, Size::kTiles);
  const bool has_row_tiles =
      p.row_tiles_each + (p.row_tiles_extra > 0 ? 1 : 0) < tile_row_tiles<kEpilogue>(p);
  p.stage_bytes = has_row_tiles ? Size::kRowTileBytes : Load::kStageTiles * Size::kTileBytes;
  int partial_bytes = Size::kPartialBytes;
  if constexpr (Load::kIsScaled) {
    if (p.tokens <= kTokenTile / 4) partial_bytes = narrow::kSlotBytes * Size::kTokens;
    if (p.most_tiles <= Size::kTiles) partial_bytes = 0;
    p.partial_bytes = partial_bytes;
  }
  const Layout rest(0, 0, p.split > 1 ? p.most_tiles : 0, p.k, !kAdds, kAdds, partial_bytes);
  p.stages = fit_stages(kRoom - rest.end, p.stage_bytes + Load::kStageTiles * Size::kScaleBytes);
  LaunchShape shape{blocks, narrow::kThreads};
  shape.shared_bytes = kRoom;
  shape.cluster = static_cast<unsigned>(p.split);
  shape.pdl = pdl;
  return launch(narrow_kernel<Size, kEpilogue>, shape, stream, p);
}

// Of a weight whose rows lie `stride` bytes apart, by parts of its columns; `k_blocks` blocks of
// 128 bytes of `box_rows` rows are a box, and have `block_columns` columns each.
template <Epilogue kEpilogue>
int make_weight_maps(Params& p, int k_blocks, const void* weight, int64_t stride,
                     int block_columns = kKBlockColumns, int box_rows = kRowTileRows) {
  constexpr int kBlockBytes = 2 * kKBlockColumns;
  const int64_t rows = (is_swiglu<kEpilogue>(p) ? 2 : 1) * static_cast<int64_t>(p.n);
  for (int part = 0; part < p.split; ++part) {
    const int column = part * p.k_each;
    const char* const begin =
        static_cast<const char*>(weight) + column / block_columns * kBlockBytes;
    const int blocks = std::min(p.k_each, p.k - column) / block_columns;
    if (const int error = make_row_tile_map(p.weight[part], k_blocks, begin, rows,
                                            blocks * kKBlockColumns, stride / 2, box_rows)) {
      return error;
    }
  }
  return cudaSuccess;
}

inline Params params_of(const LinearParams& op) {
  const bool adds = op.epilogue == Epilogue::kAdd;
  Params p = {};
  p.out = static_cast<Bf16*>(adds ? op.residual : op.out);
  p.x = static_cast<const Bf16*>(op.x);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.bias = static_cast<const Bf16*>(op.bias);
  p.counts = op.counts;
  p.out_stride = static_cast<int>(adds ? op.residual_stride : op.out_stride);
  p.x_stride = static_cast<int>(op.x_stride);
  p.tokens = static_cast<int>(op.tokens);
  p.n = static_cast<int>(op.outputs());
  p.k = static_cast<int>(op.weight.k);
  p.eps = op.eps;
  p.per_column = 1.0f / static_cast<float>(op.weight.k);
  p.is_swiglu = op.epilogue == Epilogue::kSwiglu;
  return p;
}

}  // namespace photon::cuda::stream_linear
