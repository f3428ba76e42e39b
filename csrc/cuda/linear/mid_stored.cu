// The Hopper linears of weights of fewer bits for more tokens: their launches by format, op and
// shape.
#include "cuda/linear/mid_stored.cuh"

#include <algorithm>

#include "cuda/linear/narrow_launch.cuh"
#include "cuda/linear/stream_linear.h"
#include "cuda/residency.cuh"

namespace photon::cuda {
namespace stream_linear {
namespace {

using narrow::Fp8Load, narrow::Int4Load, narrow::Int8Load;

// Beside a CTA there is room for four of prepare_x.
constexpr int kRoom = kOnlyBlock - 4 * kReservedBytes;
constexpr int kMidChunk = kKBlocks * mid_stored::kBlockColumns;

template <typename Size>
__global__ void __maxnreg__(mid_stored::kRegisters)
    mid_stored_kernel(const __grid_constant__ mid_stored::Params p) {
  if constexpr (kHopperCode) mid_stored::run_block<Size>(p);
}

mid_stored::Scales scales_of(const Weight& w) {
  const WeightScales& s = w.scales;
  mid_stored::Scales scales{};
  scales.data = s.data;
  scales.zeros = s.offsets != nullptr ? s.offsets : s.zeros;
  scales.row_groups = static_cast<int>(ceil_div(w.k, s.columns));
  scales.block_groups =
      s.columns >= w.k ? 0 : static_cast<int>(mid_stored::kBlockColumns / s.columns);
  scales.row_shift = log2_of(s.rows);
  scales.is_half = s.dtype == DType::kF16;
  return scales;
}

// Divides a cluster's tiles evenly into passes, and a pass's among M tiles, and gives the ring of
// weights what is left of the shared memory.
template <typename Size>
int launch_size(mid_stored::Params p, const LinearParams& op, void* stream) {
  using Load = typename Size::Load;
  constexpr Epilogue kEpilogue = Size::kEpilogue;
  constexpr int kMostTiles = Size::kMTiles * mid_stored::kMTileTiles;
  constexpr mid_stored::Layout<Size> kFullest(0, Size::kMTiles, kMostTiles);
  constexpr int kLeastStages =
      (kRoom - kFullest.end) / (mid_stored::kMTileTiles * kTileRows * mid_stored::kRowBytes);
  static_assert(kLeastStages >= 2 * Size::kRings, "a stage is filled while another one is read");
  const int clusters = std::max(cuda::sms() / mid_stored::kCluster, 1);
  deal_rows<kEpilogue>(p, clusters * p.split);
  const int most_pass_tiles = even_passes(p.most_tiles, kMostTiles);
  p.pass_tiles = static_cast<int>(ceil_div(most_pass_tiles, mid_stored::kMTileTiles));
  p.m_tile_tiles = static_cast<int>(ceil_div(most_pass_tiles, p.pass_tiles));
  const int row_tiles = std::min(p.m_tile_tiles * tile_row_tiles<kEpilogue>(p),
                                 p.row_tiles_each + (p.row_tiles_extra > 0 ? 1 : 0));
  p.stage_bytes = (is_swiglu<kEpilogue>(p) ? 2 : 1) * row_tiles * mid_stored::kRowTileBytes;
  const mid_stored::Layout<Size> rest(0, p.pass_tiles, p.pass_tiles * p.m_tile_tiles);
  p.stages = std::min((kRoom - rest.end) / p.stage_bytes, mid_stored::kRingStages) / Size::kRings;
  constexpr int kColumns = mid_stored::kBlockColumns * mid_stored::kStageBlocks<Load>;
  if (const int error = make_weight_maps<kEpilogue>(p, 1, op.weight.data, op.weight.stride,
                                                    kColumns, row_tiles * kRowTileRows))
    return error;
  if (const int error =
          make_row_tile_map(p.tokens_map, mid_stored::kBlockColumns / kKBlockColumns,
                            p.prepared.numbers, p.tokens, p.k, p.k, mid_stored::kTokensAtOnce))
    return error;
  LaunchShape shape{clusters * mid_stored::kCluster, mid_stored::kThreads};
  shape.shared_bytes = kRoom;
  shape.cluster = mid_stored::kCluster;
  shape.pdl = op.pdl;
  return launch(mid_stored_kernel<Size>, shape, stream, p);
}

// What prepare_x leaves in a workspace of linear_workspace_words.
PreparedX prepared_in(float* workspace, int tokens, int k, int rows) {
  const int pitch = static_cast<int>(ceil_div(tokens, kTokenTile)) * kTokenTile;
  PreparedX x{};
  x.squares = workspace;
  x.of_x = x.squares + kKBlocks * pitch;
  x.numbers = reinterpret_cast<uint32_t*>(x.of_x + k / mid_stored::kBlockColumns * rows * pitch);
  x.pitch = pitch;
  return x;
}

// Its registers fit beside a CTA of mid_stored.
template <typename Load, bool kNormalizes>
__global__ void __maxnreg__(72) prepare_x_kernel(const __grid_constant__ PrepareParams p) {
  if constexpr (kHopperCode) prepare_x<Load, kNormalizes>(p);
}

template <typename Load, bool kNormalizes>
int launch_prepare(const mid_stored::Params& p, bool pdl, void* stream) {
  PrepareParams own{};
  own.x = p.x;
  own.gain = p.gain;
  own.counts = p.counts;
  own.to = p.prepared;
  own.x_stride = p.x_stride;
  own.first_token = p.first_token;
  own.tokens = p.tokens;
  own.k = p.k;
  own.token_tiles = static_cast<int>(ceil_div(p.tokens, kTokenTile));
  own.splits = kNormalizes ? 1 : static_cast<int>(ceil_div(p.k, kMidChunk));
  LaunchShape shape{kKBlocks * own.token_tiles * own.splits, kWarpSize};
  shape.pdl = pdl;
  return launch(prepare_x_kernel<Load, kNormalizes>, shape, stream, own);
}

// `p` describes all tokens; they go in groups.
template <typename Load, Epilogue kEpilogue>
int launch_groups(mid_stored::Params p, const LinearParams& op, void* stream) {
  using Few = mid_stored::Size<Load, kMidStoredTokens / 2, kEpilogue>;
  using More = mid_stored::Size<Load, kMidStoredTokens, kEpilogue>;
  const int tokens = p.tokens;
  p.split = kEpilogue == Epilogue::kAdd ? choose_split(p.n, p.k, cuda::sms(), kMidChunk) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, kMidChunk), p.split)) * kMidChunk;
  for (; p.first_token < tokens; p.first_token += kMidStoredTokens) {
    p.tokens = std::min<int>(tokens - p.first_token, kMidStoredTokens);
    p.prepared = prepared_in(op.workspace, p.tokens, p.k, Load::kXRows);
    if (const int error = launch_prepare<Load, kEpilogue != Epilogue::kAdd>(p, op.pdl, stream))
      return error;
    const int error = p.tokens <= Few::kTokens ? launch_size<Few>(p, op, stream)
                                               : launch_size<More>(p, op, stream);
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
  const WeightScales& scales = op.weight.scales;
  if (op.weight.format == WeightFormat::kInt8)
    return narrow::with_int8_kind(scales, [&](auto kind) {
      return launch_op<Int8Load<decltype(kind)::kGroups>>(op, stream);
    });
  return narrow::with_int4_kind(scales, [&](auto kind) {
    using Kind = decltype(kind);
    return launch_op<Int4Load<Kind::kGroups, 1, Kind::kZeros>>(op, stream);
  });
}

}  // namespace photon::cuda
