// stream_linear: the kernels, and their launches by op, number of tokens and shape.
#include "cuda/stream_linear.h"

#include <algorithm>

#include "common/hopper_columns.h"
#include "cuda/stream_launch.cuh"
#include "cuda/stream_narrow.cuh"
#include "cuda/stream_tall.h"

namespace photon::cuda {
namespace stream_linear {
namespace {

constexpr int kNarrowResidents = 2;  // the next kernel's ring fills while this one works

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(narrow::kThreads, kNarrowResidents)
    narrow_kernel(const __grid_constant__ Params p) {
  if constexpr (kHopperCode) narrow::run_block<Size, kEpilogue>(p);
}

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(wide::kThreads, Size::kResidents)
    wide_kernel(const __grid_constant__ Params p) {
  if constexpr (kHopperCode) wide::run_block<Size, kEpilogue>(p);
}

constexpr int kOwnCodeWidth = 2048;  // of x: up to this, kOutput has a kernel of its own for CTAs
                                     // with few tiles; kResidual always has
constexpr int kFewTiles = 3;

template <typename Size, Epilogue kEpilogue>
int launch_narrow(Params p, int blocks, bool pdl, void* stream) {
  constexpr bool kAdds = kEpilogue == Epilogue::kResidual;
  constexpr int kRoom = shared_room<kEpilogue>(kNarrowResidents);
  constexpr int kMostPeerTiles = kMaxSplitHalfTiles / kTileHalfTiles;
  constexpr int kLeast =
      narrow::Layout(0, Size::kTiles, kAdds ? kMostPeerTiles : 0, kMaxNormColumns, !kAdds, kAdds)
          .end;
  static_assert(kRoom - kLeast >= 2 * 2 * narrow::kHalfTileBytes,
                "a stage is filled while the one after it is read");
  p.pass_tiles = even_passes(p.most_tiles, Size::kTiles);
  const bool has_half_tiles =
      p.half_tiles_each + (p.half_tiles_extra > 0 ? 1 : 0) < tile_half_tiles<kEpilogue>(p);
  p.stage_bytes = has_half_tiles ? narrow::kHalfTileBytes : 2 * narrow::kHalfTileBytes;
  const narrow::Layout rest(0, Size::kTiles, p.split > 1 ? p.most_tiles : 0, p.k, !kAdds, kAdds);
  p.stages = fit_stages(p, kRoom - rest.end);
  LaunchShape shape{blocks, narrow::kThreads};
  shape.shared_bytes = kRoom;
  shape.cluster = static_cast<unsigned>(p.split);
  shape.pdl = pdl;
  return launch(narrow_kernel<Size, kEpilogue>, shape, stream, p);
}

template <Epilogue kEpilogue>
int launch_few_tokens(Params p, int sms, const Bf16* weight, int64_t weight_stride, bool pdl,
                      void* stream) {
  const int blocks = deal_rows<kEpilogue>(p, sms);
  if (const int error = make_weight_maps<kEpilogue>(p, kSlices, weight, weight_stride))
    return error;
  using Few = narrow::Size<kFewTiles, 4>;
  const bool is_few = p.most_tiles <= kFewTiles;
  if constexpr (kEpilogue == Epilogue::kResidual) {
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
  if (const int error = make_weight_maps<kEpilogue>(p, wide::kStepSlices, weight, weight_stride))
    return error;
  return with_wide_size<kEpilogue>(
      p, [](auto) { return 0; },
      [&](auto size) {
        using Size = decltype(size);
        LaunchShape shape;
        if (const int error = prepare_wide<Size, kEpilogue>(p, shape, blocks, pdl, 0)) return error;
        return launch(wide_kernel<Size, kEpilogue>, shape, stream, p);
      });
}

template <Epilogue kEpilogue>
int launch_group(const Params& p, int sms, const Bf16* weight, int64_t weight_stride, bool pdl,
                 void* stream) {
  return p.tokens <= narrow::kTokens
             ? launch_few_tokens<kEpilogue>(p, sms, weight, weight_stride, pdl, stream)
             : launch_many_tokens<kEpilogue>(p, sms, weight, weight_stride, pdl, stream);
}

// `p` describes all tokens. `workspace`: where x is normalized for many tokens; without it they go
// in groups.
template <Epilogue kEpilogue>
int launch_tokens(Params p, const Bf16* weight, int64_t weight_stride, float* workspace, bool pdl,
                  void* stream) {
  const int count = sms(), tokens = p.tokens;
  split_columns<kEpilogue>(p, count);
  if (tokens > kGroupTokens &&
      (kEpilogue == Epilogue::kResidual || (workspace != nullptr && is_vector_aligned(workspace))))
    return launch_tall<kEpilogue>(p, weight, weight_stride, workspace, pdl, stream);
  for (; p.first_token < tokens; p.first_token += kGroupTokens) {
    p.tokens = std::min(tokens - p.first_token, kGroupTokens);
    if (const int error = launch_group<kEpilogue>(p, count, weight, weight_stride, pdl, stream))
      return error;
    p.x += kGroupTokens * static_cast<int64_t>(p.x_stride);
    p.out += kGroupTokens * static_cast<int64_t>(p.out_stride);
  }
  return cudaSuccess;
}

// Of rows that lie apart, and near enough for offsets of a few tokens in 32 bits.
bool is_stride(int64_t stride) { return stride > 0 && stride <= INT32_MAX / kTokenTile; }

constexpr const char* kMisaligned = "a pointer or a row stride is no multiple of 16 bytes";
constexpr const char* kTooLarge = "sizes or strides are beyond what 32 bits index";

static_assert(kHopperColumns == kSliceColumns);

template <typename OpParams>
const char* misfit(const OpParams& p, int64_t n, int64_t k, int64_t weight_stride,
                   int64_t out_stride, bool normalizes) {
  if (const char* device = hopper_device_misfit()) return device;
  if (p.dtype != DType::kBF16) return "the dtype is not bfloat16";
  if (const char* columns = hopper_columns_misfit(k, normalizes)) return columns;
  const bool is_small = p.tokens <= INT32_MAX - kGroupTokens && 2 * n < INT32_MAX - 16 &&
                        is_stride(p.x_stride) && is_stride(weight_stride) && is_stride(out_stride);
  if (!is_small) return kTooLarge;
  const bool is_aligned = is_vector_aligned(p.x) && is_vector_aligned(p.weight) &&
                          are_whole_vectors(p.dtype, p.x_stride, weight_stride);
  return is_aligned ? nullptr : kMisaligned;
}

}  // namespace
}  // namespace stream_linear

bool has_hopper() { return hopper_runs(); }

const char* stream_misfit(const NormLinearParams& p) {
  if (const char* why =
          stream_linear::misfit(p, p.n, p.k, p.weight_stride, p.out_stride, /*normalizes=*/true))
    return why;
  return is_vector_aligned(p.norm_weight) ? nullptr : stream_linear::kMisaligned;
}

const char* stream_misfit(const LinearResidualParams& p) {
  if (const char* why = stream_linear::misfit(p, p.n, p.k, p.weight_stride, p.residual_stride,
                                              /*normalizes=*/false))
    return why;
  if (p.n % kHalfTileRows != 0) return "the residual's width is no multiple of 8";
  const bool is_aligned =
      is_vector_aligned(p.residual) && are_whole_vectors(p.dtype, p.residual_stride);
  return is_aligned ? nullptr : stream_linear::kMisaligned;
}

const char* stream_misfit(const NormSwigluParams& p) {
  if (const char* why = stream_linear::misfit(p, p.intermediate, p.hidden, p.hidden, p.out_stride,
                                              /*normalizes=*/true))
    return why;
  return is_vector_aligned(p.norm_weight) ? nullptr : stream_linear::kMisaligned;
}

int stream_norm_linear(const NormLinearParams& op, void* stream) {
  return stream_linear::launch_tokens<stream_linear::Epilogue::kOutput>(
      stream_linear::kernel_params(op), static_cast<const Bf16*>(op.weight), op.weight_stride,
      op.workspace, op.pdl, stream);
}

int stream_linear_residual(const LinearResidualParams& op, void* stream) {
  return stream_linear::launch_tokens<stream_linear::Epilogue::kResidual>(
      stream_linear::kernel_params(op), static_cast<const Bf16*>(op.weight), op.weight_stride,
      nullptr, op.pdl, stream);
}

int stream_norm_swiglu(const NormSwigluParams& op, void* stream) {
  stream_linear::Params p = stream_linear::common_params(op, op.intermediate, op.hidden);
  p.out = static_cast<Bf16*>(op.out);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.out_stride = static_cast<int>(op.out_stride);
  p.eps = op.eps;
  p.is_swiglu = true;
  return stream_linear::launch_tokens<stream_linear::Epilogue::kOutput>(
      p, static_cast<const Bf16*>(op.weight), op.hidden, op.workspace, op.pdl, stream);
}

}  // namespace photon::cuda
