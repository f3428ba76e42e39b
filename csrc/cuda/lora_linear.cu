// Linears with adapters: one Hopper kernel for up to 64 tokens (lora_wide.cuh); for more, the
// linear between two kernels that sum in the same order; where these do not fit, between
// lora_shrink and lora_expand.
#include "common/fallbacks.h"
#include "cuda/kernels.h"
#include "cuda/lora.h"
#include "cuda/lora_wide.cuh"
#include "cuda/stream_launch.cuh"
#include "cuda/stream_linear.h"

namespace photon::cuda {
namespace adapters {
namespace {

// --- up to 64 tokens -----------------------------------------------------------------------------

template <typename Size, Epilogue kEpilogue>
__global__ void __launch_bounds__(wide::kThreads, Size::kResidents)
    lora_kernel(const __grid_constant__ stream_linear::Params p,
                const __grid_constant__ Params own) {
  if constexpr (kHopperCode) wide::run_block<Size, kEpilogue>(p, Adapters<Size, kEpilogue>(p, own));
}

template <typename P>
Params adapter_params(const P& p) {
  const LoraShrinkParams& shrink = p.shrink;
  const LoraExpandParams& expand = p.expand;
  Params own = {};
  own.a = static_cast<const Bf16*>(shrink.a);
  own.b = static_cast<const Bf16*>(expand.b);
  own.slots = shrink.slots;
  own.counts = reinterpret_cast<unsigned*>(p.exchange);
  own.sums = p.exchange + kLoraCounts;
  own.a_slot_stride = shrink.a_slot_stride;
  own.b_slot_stride = expand.b_slot_stride;
  own.a_stride = static_cast<int>(shrink.a_stride);
  own.b_stride = static_cast<int>(expand.b_stride);
  own.rank = static_cast<int>(expand.rank);
  own.parts = {static_cast<int>(expand.parts), static_cast<int>(expand.first_rows),
               static_cast<int>(expand.other_rows)};
  own.chunks = chunks_of(static_cast<int>(shrink.k));
  return own;
}

// The device does not hold all CTAs at once.
constexpr int kNotTogether = cudaErrorInvalidConfiguration;

// `p`: of the linear; `op`: all of the op.
template <Epilogue kEpilogue, typename Op>
int launch_fused(stream_linear::Params p, const Op& op, void* stream) {
  const auto* weight = static_cast<const Bf16*>(op.linear.weight);
  Params own = adapter_params(op);
  const int count = sms();
  stream_linear::split_columns<kEpilogue>(p, count);
  const int blocks = stream_linear::deal_rows<kEpilogue>(p, count);
  own.ctas = p.half_tiles_each > 0 ? blocks : p.half_tiles_extra * p.split;
  if (const int error = stream_linear::make_weight_maps<kEpilogue>(p, wide::kStepSlices, weight,
                                                                   op.linear.weight_stride))
    return error;
  return stream_linear::with_wide_size<kEpilogue>(
      p, [](auto size) { return Adapters<decltype(size), kEpilogue>::kBytes; },
      [&](auto size) {
        using Size = decltype(size);
        LaunchShape shape;
        if (const int error = stream_linear::prepare_wide<Size, kEpilogue>(
                p, shape, blocks, op.linear.pdl, Adapters<Size, kEpilogue>::kBytes))
          return error;
        return launch_together(lora_kernel<Size, kEpilogue>, shape, stream, p, own);
      });
}

// --- more tokens ---------------------------------------------------------------------------------

constexpr int kShrinkThreads = kSlices * kWarpSize, kExpandWarps = 4;
constexpr int kExpandThreads = kExpandWarps * kWarpSize;

// The slots of 8 tokens in a row, one after the other.
struct TileSlots {
  int32_t of_token[kTileTokens];

  __device__ TileSlots(const TokenSlots& slots, int64_t first, int64_t tokens) {
#pragma unroll
    for (int i = 0; i < kTileTokens; ++i)
      of_token[i] = first + i < tokens ? slot_of(slots, first + i) : 0;
  }

  // The lowest one above `last`; 0: there is none.
  __device__ int32_t after(int32_t last) const {
    int32_t next = 0;
#pragma unroll
    for (const int32_t slot : of_token) {
      if (slot > last && (next == 0 || slot < next)) next = slot;
    }
    return next;
  }
};

// A CTA: 8 tokens, a part of the linear.
template <bool kNormalizes>
__device__ void shrink_tile(const LoraShrinkParams& p, int rank, int parts) {
  __shared__ float partial[kSlices * kTileSums], squares_of[kSlices][kTileTokens];
  let_next_start();
  const Lane lane;
  const int64_t first = static_cast<int64_t>(blockIdx.x) / parts * kTileTokens,
                part = blockIdx.x % parts;
  const TileSlots slots(p.slots, first, p.tokens);
  const Chunks chunks = chunks_of(static_cast<int>(p.k));
  const int k = static_cast<int>(p.k), warp = threadIdx.x / kWarpSize;
  wait_for_earlier();

#pragma unroll 1
  for (int32_t slot = slots.after(0); slot > 0; slot = slots.after(slot)) {
    const Bf16* const a =
        static_cast<const Bf16*>(p.a) + (slot - 1) * p.a_slot_stride + part * rank * p.a_stride;
    const Bf16* const x = static_cast<const Bf16*>(p.x) + (first + lane.g) * p.x_stride;
    const Sources from{lane.g < rank ? a + lane.g * p.a_stride : nullptr,
                       lane.g + 8 < rank ? a + (lane.g + 8) * p.a_stride : nullptr,
                       first + lane.g < p.tokens ? x : nullptr,
                       static_cast<const Bf16*>(p.norm_weight)};
    float total = 0.0f, squares[2] = {};
#pragma unroll 1
    for (int group = 0; group < chunks.groups; ++group) {
      float sums[kSums] = {};
      add_slices<kNormalizes>(sums, squares, from, group * chunks.each, chunks.each, k);
      __syncthreads();  // what was there has been read
      leave_sums(sums, partial);
      if (kNormalizes && lane.g / 2 == lane.t) squares_of[warp][lane.g] = squares[lane.g % 2];
      __syncthreads();
      if (threadIdx.x < kTileSums) total += added_sums(partial, threadIdx.x);
    }
    if (threadIdx.x >= kTileSums) continue;
    const int token = token_of_sum(threadIdx.x), row = row_of_sum(threadIdx.x);
    if (row >= rank || first + token >= p.tokens || slot_of(p.slots, first + token) != slot)
      continue;
    float scale = 1.0f;
    if constexpr (kNormalizes) {
      float sum = 0.0f;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) sum += squares_of[slice][token];
      scale = rsqrtf(fmaf(sum, 1.0f / static_cast<float>(k), p.eps));
    }
    static_cast<Bf16*>(p.out)[(first + token) * p.out_stride + part * rank + row] =
        from_float<Bf16>(__fmul_rn(total, scale));
  }
}

__global__ void __launch_bounds__(kShrinkThreads)
    shrink_kernel(const LoraShrinkParams p, int rank, int parts) {
  if constexpr (kHopperCode) {
    if (p.norm_weight != nullptr) {
      shrink_tile<true>(p, rank, parts);
    } else {
      shrink_tile<false>(p, rank, parts);
    }
  }
}

// A warp: 8 tokens, 16 rows.
__global__ void __launch_bounds__(kExpandThreads)
    expand_kernel(const LoraExpandParams p, int64_t row_tiles) {
  if constexpr (!kHopperCode) return;
  let_next_start();
  const Lane lane;
  const int64_t first = blockIdx.x / row_tiles * kTileTokens;
  const int row = (static_cast<int>(blockIdx.x % row_tiles) * kExpandWarps +
                   static_cast<int>(threadIdx.x) / kWarpSize) *
                  kTileRows;
  const TileSlots slots(p.slots, first, p.tokens);
  const Parts parts{static_cast<int>(p.parts), static_cast<int>(p.first_rows),
                    static_cast<int>(p.other_rows)};
  const int rank = static_cast<int>(p.rank), low_row = row + lane.g, high_row = low_row + 8;
  wait_for_earlier();

  const Bf16* const h = static_cast<const Bf16*>(p.h) + (first + lane.g) * p.h_stride;
  const bool has_token = first + lane.g < p.tokens;
  const uint2 low_h = load_ranks(has_token && row < p.n ? h + parts.of(row) * rank : nullptr, rank),
              high_h = load_ranks(
                  has_token && row + 8 < p.n ? h + parts.of(row + 8) * rank : nullptr, rank);
#pragma unroll 1
  for (int32_t slot = slots.after(0); slot > 0; slot = slots.after(slot)) {
    const Bf16* const b = static_cast<const Bf16*>(p.b) + (slot - 1) * p.b_slot_stride;
    float sums[kSums];
    expand_tile(sums, load_ranks(low_row < p.n ? b + low_row * p.b_stride : nullptr, rank),
                load_ranks(high_row < p.n ? b + high_row * p.b_stride : nullptr, rank), low_h,
                high_h);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = lane.t * 2 + i % 2, own_row = i < 2 ? low_row : high_row;
      if (own_row >= p.n || first + token >= p.tokens || slot_of(p.slots, first + token) != slot)
        continue;
      Bf16& out = static_cast<Bf16*>(p.out)[(first + token) * p.out_stride + own_row];
      out = from_float<Bf16>(to_float(out) + rounded<Bf16>(sums[i]));
    }
  }
}

LaunchShape chained(int64_t blocks, int threads, bool pdl) {
  LaunchShape shape{blocks, threads};
  shape.pdl = pdl;
  return shape;
}

int launch_shrink(const LoraShrinkParams& p, int64_t parts, void* stream) {
  const int64_t blocks = ceil_div(p.tokens, int64_t{kTileTokens}) * parts;
  return launch(shrink_kernel, chained(blocks, kShrinkThreads, p.pdl), stream, p,
                static_cast<int>(p.rows / parts), static_cast<int>(parts));
}

int launch_expand(const LoraExpandParams& p, void* stream) {
  const int64_t row_tiles = ceil_div(p.n, int64_t{kExpandWarps} * kTileRows);
  const int64_t blocks = ceil_div(p.tokens, int64_t{kTileTokens}) * row_tiles;
  return launch(expand_kernel, chained(blocks, kExpandThreads, p.pdl), stream, p, row_tiles);
}

// --- which ---------------------------------------------------------------------------------------

const char* misfit(const LoraShrinkParams& shrink, const LoraExpandParams& expand) {
  if (expand.rank > kLoraRank || expand.rank % 8 != 0) return "the rank is neither 8 nor 16";
  if (expand.parts > kLoraParts) return "the linear has more than 3 parts";
  if (expand.first_rows % 8 != 0 || expand.other_rows % 8 != 0)
    return "the rows of a part are no multiple of 8";
  const bool fits = is_vector_aligned(shrink.a) && is_vector_aligned(expand.b) &&
                    is_vector_aligned(shrink.out) &&
                    are_whole_vectors(shrink.dtype, shrink.a_stride, shrink.a_slot_stride,
                                      shrink.out_stride, expand.b_stride, expand.b_slot_stride) &&
                    shrink.a_stride <= INT32_MAX && expand.b_stride <= INT32_MAX;
  return fits ? nullptr : "matrices of adapters are no whole vectors of 16 bytes";
}

template <typename P>
bool streams(const char* op, const P& p) {
  if (!p.linear.hopper) return false;
  const char* why = stream_misfit(p.linear);
  return runs_hopper(op, why != nullptr ? why : misfit(p.shrink, p.expand));
}

// One after the other; `linear()` is the linear.
template <typename P, typename Linear>
int in_turn(const P& p, bool hopper, void* stream, const Linear& linear) {
  const int shrunk =
      hopper ? launch_shrink(p.shrink, p.expand.parts, stream) : lora_shrink(p.shrink, stream);
  if (shrunk != 0) return shrunk;
  if (const int error = linear(p.linear, stream)) return error;
  return hopper ? launch_expand(p.expand, stream) : lora_expand(p.expand, stream);
}

}  // namespace
}  // namespace adapters

int lora_norm_linear(const LoraNormLinearParams& p, void* stream) {
  if (p.linear.tokens == 0 || p.linear.n == 0) return 0;
  const bool hopper = adapters::streams("lora_norm_linear_into", p);
  if (hopper && p.linear.tokens <= kLoraTokens) {
    const int error = adapters::launch_fused<adapters::Epilogue::kOutput>(
        stream_linear::kernel_params(p.linear), p, stream);
    if (error != adapters::kNotTogether) return error;
  }
  return adapters::in_turn(p, hopper, stream, norm_linear);
}

int lora_linear_residual(const LoraResidualParams& p, void* stream) {
  if (p.linear.tokens == 0 || p.linear.n == 0) return 0;
  const bool hopper = adapters::streams("lora_linear_residual_", p);
  if (hopper && p.linear.tokens <= kLoraTokens) {
    const int error = adapters::launch_fused<adapters::Epilogue::kResidual>(
        stream_linear::kernel_params(p.linear), p, stream);
    if (error != adapters::kNotTogether) return error;
  }
  return adapters::in_turn(p, hopper, stream, linear_residual);
}

int lora_norm_swiglu(const LoraNormSwigluParams& p, void* stream) {
  if (p.linear.tokens == 0 || p.linear.n == 0) return 0;
  const bool hopper = adapters::streams("lora_norm_swiglu_into", p);
  if (hopper && p.linear.tokens <= kLoraTokens) {
    stream_linear::Params fused = stream_linear::kernel_params(p.linear);
    fused.out = static_cast<Bf16*>(p.silu_mul.out);
    fused.out_stride = static_cast<int>(p.silu_mul.out_stride);
    fused.n = static_cast<int>(p.silu_mul.width);
    fused.is_swiglu = true;
    const int error = adapters::launch_fused<adapters::Epilogue::kOutput>(fused, p, stream);
    if (error != adapters::kNotTogether) return error;
  }
  const int error = adapters::in_turn(p, hopper, stream, norm_linear);
  return error != 0 ? error : silu_mul(p.silu_mul, stream);
}

}  // namespace photon::cuda
