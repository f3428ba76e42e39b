// From an op's params to those of a kernel for up to 64 tokens: who takes which rows, which size,
// how shared memory is divided.
#pragma once
#include <algorithm>

#include "common/params.h"
#include "cuda/residency.cuh"
#include "cuda/stream_wide.cuh"

namespace photon::cuda::stream_linear {

constexpr int kGroupTokens = 64;          // of a launch
constexpr int64_t kTwoCtaColumns = 8192;  // for up to 32 tokens: up to this an SM holds two CTAs
constexpr int kMaxSplitHalfTiles =
    8;  // of a pair of CTAs: what they exchange lies in shared memory
constexpr double kWorthSplitting = 0.9;

// Shared memory of a CTA, where an SM is to hold two of them or one.
template <Epilogue kEpilogue>
constexpr int shared_room(int residents) {
  if (residents == 1) return kOnlyBlock;
  return kEpilogue == Epilogue::kResidual ? kLargerBlock : kSmallerBlock;
}

// Which part of the SMs' time is used if `groups` of them divide `half_tiles`.
inline double balance(int64_t half_tiles, int64_t groups) {
  return static_cast<double>(half_tiles) / (groups * ceil_div(half_tiles, groups));
}

// How many split-K parts: two, unless pairs of CTAs divide the rows worse. A CTA with half of the
// columns reads half as much of x, which counts where tokens are many. The answer depends on the
// shape and the device alone, and each part has a chunk at least.
inline int choose_split(int64_t n, int64_t k, int sms) {
  const int64_t half_tiles = ceil_div(n, kHalfTileRows), pairs = sms / 2;
  if (pairs == 0 || k < 2 * kChunk || ceil_div(half_tiles, pairs) > kMaxSplitHalfTiles) return 1;
  return balance(half_tiles, pairs) >= kWorthSplitting * balance(half_tiles, sms) ? 2 : 1;
}

// Deals the rows out to CTAs; returns how many CTAs there are.
template <Epilogue kEpilogue>
int deal_rows(Params& p, int sms) {
  const int64_t half_tiles = ceil_div(p.n, kHalfTileRows);
  const int row_blocks = std::max(sms / p.split, 1);
  p.half_tiles_each = static_cast<int>(half_tiles / row_blocks);
  p.half_tiles_extra = static_cast<int>(half_tiles % row_blocks);
  p.most_tiles =
      static_cast<int>(ceil_div(ceil_div(half_tiles, row_blocks), tile_half_tiles<kEpilogue>(p)));
  return row_blocks * p.split;
}

// `room`: bytes of shared memory that the rest of a layout leaves to the ring.
inline int fit_stages(const Params& p, int room) {
  return std::min(room / p.stage_bytes, kMaxStages);
}

// How many things a pass takes, if `all` are done in as few passes as possible of at most `most`
// each, and evenly.
inline int even_passes(int all, int most) {
  return static_cast<int>(ceil_div(all, ceil_div(all, most)));
}

// Tiles of an M tile; the last M tile of a CTA may have fewer.
inline int even_m_tile(int tiles) { return even_passes(tiles, wide::kMTileTiles); }

// Divides a CTA's shared memory between the rings; `adapter_bytes` of it are taken.
template <typename Size, Epilogue kEpilogue>
Params with_rings(Params p, int adapter_bytes = 0) {
  constexpr bool kAdds = kEpilogue == Epilogue::kResidual;
  p.m_tile_tiles = even_m_tile(p.most_tiles);
  p.pass_tiles =
      even_passes(static_cast<int>(ceil_div(p.most_tiles, p.m_tile_tiles)), Size::kMTiles);
  p.stage_bytes = p.m_tile_tiles * wide::kTileBytes;
  const wide::Layout<Size> rest(0, 0, wide::has_one_pass(p), p.split > 1 ? p.most_tiles : 0, p.k,
                                !kAdds, kAdds, adapter_bytes);
  const int room = (shared_room<kEpilogue>(Size::kResidents) - rest.end) / wide::kGroups;
  const int steps = static_cast<int>(ceil_div(p.k_each, kChunk)) * wide::kChunkSteps;
  // The rings divide it as the traffic does: for each step of x there are the weights of a pass's M
  // tiles. What is left over goes to the weights, which take longer to arrive.
  const int fair = room / (Size::kXBytes + p.pass_tiles * p.stage_bytes);
  p.x_stages = std::max(std::min({steps, wide::kMaxXStages, fair}), wide::kLeastXStages);
  p.stages = fit_stages(p, room - p.x_stages * Size::kXBytes);
  return p;
}

// The size of the wide kernel: body(Size()). `bytes_of(Size())`: of shared memory, for adapters.
template <Epilogue kEpilogue, typename BytesOf, typename Body>
int with_wide_size(const Params& p, const BytesOf& bytes_of, const Body& body) {
  // Two passes over x are better than one, if that leaves room for CTAs of the next kernel beside
  // these. Three passes are not, and neither is a ring of one stage, which has to be read before it
  // is filled again.
  using Small = wide::Size<32, 1, 2>;
  if (p.tokens <= 16) {
    if (p.k <= kTwoCtaColumns) return body(wide::Size<16, 2, 2>());
    return body(wide::Size<16, 2, 1>());
  }
  if (p.tokens <= 32) {
    const bool is_small = p.most_tiles <= 2 * wide::kMTileTiles && p.k <= kTwoCtaColumns &&
                          with_rings<Small, kEpilogue>(p, bytes_of(Small())).stages > 1;
    if (is_small) return body(Small());
    return body(wide::Size<32, 3, 1>());
  }
  return body(wide::Size<64, 1, 1>());
}

// The params and the launch of a wide kernel of that size.
template <typename Size, Epilogue kEpilogue>
int prepare_wide(Params& p, LaunchShape& shape, int blocks, bool pdl, int adapter_bytes) {
  static_assert(2 * wide::kGroups * Size::kXBytes >= wide::kMTileBytes - wide::kTileBytes,
                "an instruction reads what lies behind a stage");
  if (const int error = make_half_tile_map(p.tokens_map, wide::kStepSlices, p.x, p.tokens, p.k,
                                           p.x_stride, Size::kTokens))
    return error;
  shape = LaunchShape{blocks, wide::kThreads};
  shape.shared_bytes = shared_room<kEpilogue>(Size::kResidents);
  shape.cluster = static_cast<unsigned>(p.split);
  shape.pdl = pdl;
  p = with_rings<Size, kEpilogue>(p, adapter_bytes);
  return cudaSuccess;
}

// The weight, by parts of its columns.
template <Epilogue kEpilogue>
int make_weight_maps(Params& p, int slices, const Bf16* weight, int64_t stride) {
  const int64_t rows = (is_swiglu<kEpilogue>(p) ? 2 : 1) * static_cast<int64_t>(p.n);
  for (int part = 0; part < p.split; ++part) {
    const int column = part * p.k_each;
    if (const int error = make_half_tile_map(p.weight[part], slices, weight + column, rows,
                                             std::min(p.k_each, p.k - column), stride)) {
      return error;
    }
  }
  return cudaSuccess;
}

// What the three ops' params have in common; `out` and the rest are the op's own.
template <typename OpParams>
Params common_params(const OpParams& op, int64_t n, int64_t k) {
  Params p = {};
  p.x = static_cast<const Bf16*>(op.x);
  p.bias = static_cast<const Bf16*>(op.bias);
  p.counts = op.counts;
  p.x_stride = static_cast<int>(op.x_stride);
  p.tokens = static_cast<int>(op.tokens);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.per_column = 1.0f / static_cast<float>(k);
  return p;
}

// Split-K: how many parts, and columns of each.
template <Epilogue kEpilogue>
void split_columns(Params& p, int sms) {
  p.split = kEpilogue == Epilogue::kResidual ? choose_split(p.n, p.k, sms) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, kChunk), p.split)) * kChunk;
}

inline Params kernel_params(const NormLinearParams& op) {
  Params p = common_params(op, op.n, op.k);
  p.out = static_cast<Bf16*>(op.out);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.out_stride = static_cast<int>(op.out_stride);
  p.eps = op.eps;
  return p;
}

inline Params kernel_params(const LinearResidualParams& op) {
  Params p = common_params(op, op.n, op.k);
  p.out = static_cast<Bf16*>(op.residual);
  p.out_stride = static_cast<int>(op.residual_stride);
  return p;
}

}  // namespace photon::cuda::stream_linear
