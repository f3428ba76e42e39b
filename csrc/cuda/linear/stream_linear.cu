// stream_linear: the kernels, and their launches by op, number of tokens and shape.
#include "cuda/linear/stream_linear.h"

#include <algorithm>

#include "cuda/linear/large_linear.h"
#include "cuda/linear/mid_linear.cuh"
#include "cuda/linear/narrow_launch.cuh"
#include "cuda/residency.cuh"

namespace photon::cuda {
namespace stream_linear {
namespace {

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(mid::kCtaThreads<Size, kEpilogue>, Size::kResidents)
    mid_kernel(const __grid_constant__ Params p) {
  if constexpr (kHopperCode) mid::run_block<Size, kEpilogue>(p);
}

constexpr int64_t kTwoCtaColumns = 8192;  // for up to 32 tokens: up to this an SM holds two CTAs
constexpr int kOwnCodeWidth = 2048;  // of x: up to this, kStore has a kernel of its own for CTAs
                                     // with few tiles; kAdd always has
constexpr int kFewTiles = 3;

// Tiles of an M tile; the last M tile of a CTA may have fewer.
int even_m_tile(int tiles) { return even_passes(tiles, mid::kMTileTiles); }

// Divides a CTA's shared memory between the rings.
template <typename Size, Epilogue kEpilogue>
Params with_rings(Params p) {
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  p.m_tile_tiles = even_m_tile(p.most_tiles);
  p.pass_tiles =
      even_passes(static_cast<int>(ceil_div(p.most_tiles, p.m_tile_tiles)), Size::kMTiles);
  p.stage_bytes = p.m_tile_tiles * mid::kTileBytes;
  const mid::Layout<Size> rest(0, 0, mid::has_one_pass(p), p.split > 1 ? p.most_tiles : 0, p.k,
                               !kAdds, kAdds);
  const int room = (shared_room<kEpilogue>(Size::kResidents) - rest.end) / mid::kGroups;
  const int steps = static_cast<int>(ceil_div(p.k_each, kKChunk)) * mid::kKChunkSteps;
  // The rings divide it as the traffic does: for each step of x there are the weights of a pass's M
  // tiles. What is left over goes to the weights, which take longer to arrive.
  const int fair = room / (Size::kXBytes + p.pass_tiles * p.stage_bytes);
  p.x_stages = std::max(std::min({steps, mid::kMaxXStages, fair}), mid::kLeastXStages);
  p.stages = fit_stages(room - p.x_stages * Size::kXBytes, p.stage_bytes);
  return p;
}

template <typename Size, Epilogue kEpilogue>
int launch_mid(Params p, int blocks, bool pdl, void* stream) {
  static_assert(2 * mid::kGroups * Size::kXBytes >= mid::kMTileBytes - mid::kTileBytes,
                "an instruction reads what lies behind a stage");
  if (const int error = make_row_tile_map(p.tokens_map, mid::kStepKBlocks, p.x, p.tokens, p.k,
                                          p.x_stride, Size::kTokens))
    return error;
  LaunchShape shape{blocks, mid::kCtaThreads<Size, kEpilogue>};
  shape.shared_bytes = shared_room<kEpilogue>(Size::kResidents);
  shape.cluster = static_cast<unsigned>(p.split);
  shape.pdl = pdl;
  return launch(mid_kernel<Size, kEpilogue>, shape, stream, with_rings<Size, kEpilogue>(p));
}

template <Epilogue kEpilogue>
int launch_few_tokens(Params p, int sms, const Bf16* weight, int64_t weight_stride, bool pdl,
                      void* stream) {
  const int blocks = deal_rows<kEpilogue>(p, sms);
  if (const int error = make_weight_maps<kEpilogue>(p, kKBlocks, weight, 2 * weight_stride))
    return error;
  using Few = narrow::Size<kFewTiles, 4>;
  const bool is_few = p.most_tiles <= kFewTiles;
  if constexpr (kEpilogue == Epilogue::kAdd) {
    if (is_few) return launch_narrow<Few, kEpilogue>(p, blocks, pdl, stream);
    return launch_narrow<narrow::Size<4, 4>, kEpilogue>(
        p, blocks, pdl, stream);  // as many tiles as a pair of CTAs shares
  } else {
    // The width decides, because QKV and gate/up of a model have the same: in wide models both run
    // the same code, which then stays in the caches (stream_common.cuh).
    if (is_few && p.k <= kOwnCodeWidth)
      return launch_narrow<Few, kEpilogue>(p, blocks, pdl, stream);
    return launch_narrow<narrow::Size<10, 2>, kEpilogue>(p, blocks, pdl, stream);
  }
}

template <Epilogue kEpilogue>
int launch_many_tokens(Params p, int sms, const Bf16* weight, int64_t weight_stride, bool pdl,
                       void* stream) {
  const int blocks = deal_rows<kEpilogue>(p, sms);
  if (const int error =
          make_weight_maps<kEpilogue>(p, mid::kStepKBlocks, weight, 2 * weight_stride))
    return error;
  // Two passes over x are better than one, if that leaves room for CTAs of the next kernel beside
  // these. Three passes are not, and neither is a ring of one stage, which has to be read before it
  // is filled again.
  using Small = mid::Size<32, 1, 2>;
  const bool is_small = p.most_tiles <= 2 * mid::kMTileTiles && p.k <= kTwoCtaColumns &&
                        with_rings<Small, kEpilogue>(p).stages > 1;
  if (p.tokens <= 16) {
    if (p.k <= kTwoCtaColumns)
      return launch_mid<mid::Size<16, 2, 2>, kEpilogue>(p, blocks, pdl, stream);
    return launch_mid<mid::Size<16, 2, 1>, kEpilogue>(p, blocks, pdl, stream);
  }
  if (p.tokens <= 32) {
    if (is_small) return launch_mid<Small, kEpilogue>(p, blocks, pdl, stream);
    return launch_mid<mid::Size<32, 3, 1>, kEpilogue>(p, blocks, pdl, stream);
  }
  return launch_mid<mid::Size<64, 1, 1>, kEpilogue>(p, blocks, pdl, stream);
}

template <Epilogue kEpilogue>
int launch_group(const Params& p, int sms, const Bf16* weight, int64_t weight_stride, bool pdl,
                 void* stream) {
  return kernel_of_group(p.tokens) == LinearKernel::kNarrow
             ? launch_few_tokens<kEpilogue>(p, sms, weight, weight_stride, pdl, stream)
             : launch_many_tokens<kEpilogue>(p, sms, weight, weight_stride, pdl, stream);
}

// `p` describes all tokens. For kMid there may be more than a launch takes: they go in groups.
template <Epilogue kEpilogue>
int launch_tokens(Params p, const LinearParams& op, LinearKernel kernel, void* stream) {
  const Weight& w = op.weight;
  const Bf16* const weight = static_cast<const Bf16*>(w.data);
  const int count = sms(), tokens = p.tokens;
  p.split = kEpilogue == Epilogue::kAdd ? choose_split(p.n, p.k, count, kKChunk) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, kKChunk), p.split)) * kKChunk;
  if (kernel == LinearKernel::kLarge)
    return launch_large<kEpilogue>(p, weight, w.stride, op.workspace, op.pdl, stream);
  for (; p.first_token < tokens; p.first_token += kMidTokens) {
    p.tokens = std::min<int>(tokens - p.first_token, kMidTokens);
    if (const int error = launch_group<kEpilogue>(p, count, weight, w.stride, op.pdl, stream))
      return error;
    p.x += kMidTokens * static_cast<int64_t>(p.x_stride);
    p.out += kMidTokens * static_cast<int64_t>(p.out_stride);
  }
  return cudaSuccess;
}

static_assert(kHopperColumns == kKBlockColumns && kHopperOutputs == kRowTileRows &&
              kNarrowTokens == kTokenTile && kMaxStride == INT32_MAX / kTokenTile);

}  // namespace
}  // namespace stream_linear

int run_stream_linear(const LinearParams& op, LinearKernel kernel, void* stream) {
  const stream_linear::Params p = stream_linear::params_of(op);
  return op.epilogue == Epilogue::kAdd
             ? stream_linear::launch_tokens<Epilogue::kAdd>(p, op, kernel, stream)
             : stream_linear::launch_tokens<Epilogue::kStore>(p, op, kernel, stream);
}

}  // namespace photon::cuda

PHOTON_TAKE_STAMPS(linears)
