// The Hopper linears of weights of fewer bits for 33 to 64 tokens: their launches by format, op and
// shape.
#include "cuda/linear/mid_stored.cuh"

#include <algorithm>

#include "cuda/linear/narrow_launch.cuh"
#include "cuda/linear/stream_linear.h"
#include "cuda/residency.cuh"

namespace photon::cuda {
namespace stream_linear {
namespace {

using narrow::Fp8Load, narrow::Int4Load;

constexpr int kMidChunk = kKBlocks * mid_stored::kBlockColumns;

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(Size::kThreads, 1)
    mid_stored_kernel(const __grid_constant__ mid_stored::Params p) {
  if constexpr (kHopperCode) mid_stored::run_block<Size, kEpilogue>(p);
}

mid_stored::Scales scales_of(const Weight& w) {
  const WeightScales& s = w.scales;
  mid_stored::Scales scales{};
  scales.data = s.data;
  scales.zeros = s.zeros;
  scales.row_groups = static_cast<int>(ceil_div(w.k, s.columns));
  scales.block_groups =
      s.columns >= w.k ? 0 : static_cast<int>(mid_stored::kBlockColumns / s.columns);
  while (int64_t{1} << scales.row_shift < s.rows) ++scales.row_shift;
  scales.is_half = s.dtype == DType::kF16;
  return scales;
}

// Divides a CTA's tiles evenly into passes, and a pass's among M tiles, and gives the ring of
// weights what is left of the shared memory.
template <typename Size, Epilogue kEpilogue>
int launch_size(mid_stored::Params p, int blocks, const Weight& weight, bool pdl, void* stream) {
  using Load = typename Size::Load;
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  constexpr int kMostTiles = Size::kMTiles * mid_stored::kMTileTiles,
                kPeerTiles = kAdds && Size::kMTiles == 1 ? kMostTiles : 0;
  constexpr mid_stored::Layout<Size> kFullest(0, kMostTiles, kPeerTiles, kMaxNormColumns, !kAdds,
                                              kAdds);
  constexpr int kLeastStages =
      (kOnlyBlock - kFullest.end) / (kMostTiles * kTileRows * mid_stored::kRowBytes);
  static_assert(kLeastStages * mid_stored::kStageBlocks<Load> >= Size::kXStages - Size::kAhead,
                "weights are there for all K blocks of x that are");
  p.m_tile_tiles = static_cast<int>(ceil_div(even_passes(p.most_tiles, kMostTiles), Size::kMTiles));
  p.pass_tiles = std::min(Size::kMTiles, static_cast<int>(ceil_div(p.most_tiles, p.m_tile_tiles)));
  const int pass_tiles = p.pass_tiles * p.m_tile_tiles,
            row_tiles = std::min(pass_tiles * tile_row_tiles<kEpilogue>(p),
                                 p.row_tiles_each + (p.row_tiles_extra > 0 ? 1 : 0));
  p.stage_bytes = (is_swiglu<kEpilogue>(p) ? 2 : 1) * row_tiles * mid_stored::kRowTileBytes;
  const mid_stored::Layout<Size> rest(0, pass_tiles, p.split > 1 ? p.most_tiles : 0, p.k, !kAdds,
                                      kAdds);
  p.stages = fit_stages(kOnlyBlock - rest.end, p.stage_bytes);
  constexpr int kColumns = mid_stored::kBlockColumns * mid_stored::kStageBlocks<Load>;
  if (const int error = make_weight_maps<kEpilogue>(p, 1, weight.data, weight.stride, kColumns,
                                                    row_tiles * kRowTileRows))
    return error;
  if (const int error = make_row_tile_map(p.tokens_map, mid_stored::kBlockColumns / kKBlockColumns,
                                          p.x, p.tokens, p.k, p.x_stride, Size::kTokens))
    return error;
  LaunchShape shape{blocks, Size::kThreads};
  shape.shared_bytes = kOnlyBlock;
  shape.cluster = static_cast<unsigned>(p.split);
  shape.pdl = pdl;
  return launch(mid_stored_kernel<Size, kEpilogue>, shape, stream, p);
}

template <typename Load, int kTokens, Epilogue kEpilogue>
int launch_tokens(const mid_stored::Params& p, int blocks, const LinearParams& op, void* stream) {
  using One = mid_stored::Size<Load, kTokens, 1, 2>;
  using More = mid_stored::Size<Load, kTokens, Load::kGroups == 1 ? 3 : 2, 1>;
  return p.most_tiles <= mid_stored::kMTileTiles
             ? launch_size<One, kEpilogue>(p, blocks, op.weight, op.pdl, stream)
             : launch_size<More, kEpilogue>(p, blocks, op.weight, op.pdl, stream);
}

// `p` describes all tokens; they go in groups.
template <typename Load, Epilogue kEpilogue>
int launch_groups(mid_stored::Params p, const LinearParams& op, void* stream) {
  constexpr int kFew = kMidStoredTokens / 2;
  const int tokens = p.tokens, sms = cuda::sms();
  p.split = kEpilogue == Epilogue::kAdd ? choose_split(p.n, p.k, sms, kMidChunk) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, kMidChunk), p.split)) * kMidChunk;
  const int blocks = deal_rows<kEpilogue>(p, sms);
  for (; p.first_token < tokens; p.first_token += kMidStoredTokens) {
    p.tokens = std::min<int>(tokens - p.first_token, kMidStoredTokens);
    const int error = p.tokens <= kFew
                          ? launch_tokens<Load, kFew, kEpilogue>(p, blocks, op, stream)
                          : launch_tokens<Load, kMidStoredTokens, kEpilogue>(p, blocks, op, stream);
    if (error) return error;
    p.x += kMidStoredTokens * static_cast<int64_t>(p.x_stride);
    p.out += kMidStoredTokens * static_cast<int64_t>(p.out_stride);
  }
  return cudaSuccess;
}

template <typename Load>
int launch_op(const LinearParams& op, void* stream) {
  mid_stored::Params p{};
  static_cast<Params&>(p) = params_of(op);
  p.scales = scales_of(op.weight);
  return op.epilogue == Epilogue::kAdd ? launch_groups<Load, Epilogue::kAdd>(p, op, stream)
                                       : launch_groups<Load, Epilogue::kStore>(p, op, stream);
}

}  // namespace
}  // namespace stream_linear

int run_mid_stored(const LinearParams& op, void* stream) {
  using namespace stream_linear;
  if (op.weight.format == WeightFormat::kFp8) return launch_op<Fp8Load>(op, stream);
  const bool has_zeros = op.weight.scales.zeros != nullptr;
  if (op.weight.scales.columns < kScaleBlock)
    return has_zeros ? launch_op<Int4Load<4, 1, true>>(op, stream)
                     : launch_op<Int4Load<4, 1, false>>(op, stream);
  return has_zeros ? launch_op<Int4Load<1, 1, true>>(op, stream)
                   : launch_op<Int4Load<1, 1, false>>(op, stream);
}

}  // namespace photon::cuda
