// The Hopper linears for many tokens: which tiles a launch has, and the launches.
#include "cuda/linear/large_linear.h"

#include <algorithm>

#include "cuda/linear/large_linear.cuh"
#include "cuda/linear/stream_common.cuh"
#include "cuda/residency.cuh"

namespace photon::cuda::stream_linear {
namespace large {

// What stands in front of the linears for many tokens where x is normalized: x times the gains, and
// of each token one over its root mean square, in the bits of the kernels that do this themselves.
//
// A CTA has eight tokens. Of each K chunk warp w takes K block w, of all tokens; at the end the K
// blocks' sums of squares are added in order.

constexpr int kNormThreads = kKBlocks * kWarpSize;

struct NormParams {
  const Bf16* x;  // [tokens, k]
  const Bf16* gain;
  const int32_t* counts;
  Bf16* normed;  // [tokens, k], contiguous
  float* scale;  // [tokens]
  int64_t x_stride;
  int tokens, k;
  float eps, per_column;
};

__device__ inline void normalize_tokens(const NormParams& p) {
  __shared__ float squares[kKBlocks][kTokenTile];
  let_next_start();
  const int active = min(p.counts != nullptr ? max(load_fresh(p.counts), 0) : p.tokens, p.tokens);
  wait_for_earlier();
  const int first = static_cast<int>(blockIdx.x) * kTokenTile;
  if (first >= active) return;
  const LaneVectors at;
  const int k_block = threadIdx.x / kWarpSize, token = first + at.group;
  const bool is_live = token < active;
  const Bf16* const from = p.x + (is_live ? token : first) * p.x_stride;
  Bf16* const to = p.normed + static_cast<int64_t>(token) * p.k;
  float sums[2] = {};
#pragma unroll 4
  for (int column = k_block * kKBlockColumns; column < p.k; column += kKChunk) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int own = column + at.column(half);
      uint4 v = load_fresh_if(is_live, reinterpret_cast<const uint4*>(from + own));
      normalize(v, *reinterpret_cast<const uint4*>(p.gain + own), sums);
      if (is_live) *reinterpret_cast<uint4*>(to + own) = v;
    }
  }
  if (at.group / 2 == at.thread) squares[k_block][at.group] = at.group % 2 == 0 ? sums[0] : sums[1];
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x);
  if (own >= kTokenTile || first + own >= active) return;
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kKBlocks; ++s) sum += squares[s][own];
  p.scale[first + own] = rsqrtf(fmaf(sum, p.per_column, p.eps));
}
namespace {

template <int kRows, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1) large_kernel(const __grid_constant__ Params p) {
  if constexpr (kHopperCode) run_block<kRows, kEpilogue>(p);
}

__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormParams p) {
  if constexpr (kHopperCode) normalize_tokens(p);
}

// How the work is divided: rows of a tile, and whether two CTAs share them.
struct Plan {
  int rows;
  bool is_paired;

  int ctas() const { return is_paired ? 2 : 1; }
};

// What a launch multiplies.
struct Shape {
  int64_t tokens, n, k;
  bool is_swiglu;
  int sms;

  int64_t row_tiles(int rows) const { return ceil_div(is_swiglu ? 2 * n : n, rows); }
  int64_t token_tiles() const { return ceil_div(tokens, kTokens); }

  int64_t units(const Plan& plan) const {
    return row_tiles(plan.rows) * ceil_div(token_tiles(), plan.ctas());
  }
};

// Bytes in a clock: of L2's, the share of an SM where all read; and what an SM takes at most.
constexpr int64_t kL2Bytes = 44, kSmBytesIn = 56;
constexpr int64_t kTileClocks = 2500;  // of a tile beside its products: the start and the end
constexpr int64_t kPairPercent = 106;  // of the clocks, as two CTAs wait for each other

// Clocks that a launch should take where all it reads lies in L2. Fitted to an H200: of all plans
// of the 4B's and the 0.6B's linears at 128 to 2,048 tokens, the one that this prefers takes 1.3 %
// longer than the fastest on average, and 6 % at worst.
int64_t cost(const Shape& shape, const Plan& plan) {
  const int64_t places = shape.sms / plan.ctas(), units = shape.units(plan);
  const int64_t ctas = std::min(units, places) * plan.ctas();
  const int64_t read = 32 * (kTokens + plan.rows / plan.ctas());
  const int64_t step =
      std::max({static_cast<int64_t>(plan.rows), read * ctas / (kL2Bytes * shape.sms),
                32 * (kTokens + plan.rows) / kSmBytesIn});  // of 16 columns
  const int64_t clocks = ceil_div(units, places) * (shape.k / 16 * step + kTileClocks);
  return plan.is_paired ? clocks * kPairPercent / 100 : clocks;
}

// The sizes of tiles that there are. A SwiGLU tile is of whole eights of gate rows, and the sums of
// two parts of the columns leave no room for the largest.
constexpr int kSizes[] = {16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 176, 192};

template <Epilogue kEpilogue>
constexpr bool has_size(int rows) {
  return kEpilogue == Epilogue::kAdd ? rows <= 176 : rows >= 32 && rows % 16 == 0;
}

bool can_run(const Shape& shape, const Plan& plan) {
  return !plan.is_paired || (shape.sms > 1 && shape.token_tiles() > 1 && plan.rows % 16 == 0);
}

template <Epilogue kEpilogue>
Plan choose_plan(const Shape& shape) {
  Plan best{};
  int64_t least = INT64_MAX;
  for (const int rows : kSizes) {
    if (!has_size<kEpilogue>(rows)) continue;
    for (const Plan& plan : {Plan{rows, false}, Plan{rows, true}}) {
      if (!can_run(shape, plan)) continue;
      const int64_t clocks = cost(shape, plan);
      if (clocks >= least) continue;
      least = clocks;
      best = plan;
    }
  }
  return best;
}

template <int kRows, Epilogue kEpilogue>
int launch_size(Params p, const Shape& shape, const Plan& plan, bool pdl, void* stream) {
  p.is_paired = plan.is_paired;
  p.row_tiles = static_cast<int>(shape.row_tiles(kRows));
  const int kept = p.split > 1 ? kKeptBytes<kRows> : 0;
  p.stages = std::min((kOnlyBlock - kBarrierBytes - kept) / kStageBytes<kRows>, kMaxStages);
  LaunchShape launched{
      std::min(shape.units(plan), static_cast<int64_t>(shape.sms / plan.ctas())) * plan.ctas(),
      kThreads};
  launched.shared_bytes = kOnlyBlock;
  launched.cluster = static_cast<unsigned>(plan.ctas());
  launched.pdl = pdl;
  return launch(large_kernel<kRows, kEpilogue>, launched, stream, p);
}

template <Epilogue kEpilogue, int kRows, int... kMore>
int launch_plan(const Params& p, const Shape& shape, const Plan& plan, bool pdl, void* stream) {
  if constexpr (has_size<kEpilogue>(kRows)) {
    if (plan.rows == kRows) return launch_size<kRows, kEpilogue>(p, shape, plan, pdl, stream);
  }
  if constexpr (sizeof...(kMore) > 0)
    return launch_plan<kEpilogue, kMore...>(p, shape, plan, pdl, stream);
  return cudaErrorInvalidValue;
}

// Makes the maps for the plan, and launches.
template <Epilogue kEpilogue>
int launch_tiles(Params p, const Shape& shape, const Plan& plan, const Bf16* x, int64_t x_stride,
                 const Bf16* weight, int64_t weight_stride, bool pdl, void* stream) {
  p.is_paired = plan.is_paired;
  if (const int error = make_row_tile_map(p.x, 1, x, p.tokens, p.k, x_stride, kTokens))
    return error;
  const int box_rows = copies_halves(p) ? plan.rows / 2 : plan.rows;
  const int64_t rows = (p.is_swiglu ? 2 : 1) * shape.n;
  if (const int error = make_row_tile_map(p.weight, 1, weight, rows, p.k, weight_stride, box_rows))
    return error;
  return launch_plan<kEpilogue, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 176, 192>(p, shape, plan,
                                                                                    pdl, stream);
}

int launch_norm(const stream_linear::Params& op, Bf16* normed, float* scale, bool pdl,
                void* stream) {
  NormParams p{};
  p.x = op.x;
  p.gain = op.gain;
  p.counts = op.counts;
  p.normed = normed;
  p.scale = scale;
  p.x_stride = op.x_stride;
  p.tokens = op.tokens;
  p.k = op.k;
  p.eps = op.eps;
  p.per_column = op.per_column;
  LaunchShape shape{ceil_div(p.tokens, kTokenTile), kNormThreads};
  shape.pdl = pdl;
  return launch(norm_kernel, shape, stream, p);
}

Params tile_params(const stream_linear::Params& op) {
  Params p{};
  p.out = op.out;
  p.bias = op.bias;
  p.counts = op.counts;
  p.out_stride = op.out_stride;
  p.tokens = op.tokens;
  p.n = op.n;
  p.k = op.k;
  p.split = op.split;
  p.k_each = op.k_each;
  p.is_swiglu = op.is_swiglu;
  p.stores_pairs = reinterpret_cast<uintptr_t>(op.out) % 4 == 0 && op.out_stride % 2 == 0;
  p.rereads_weight = op.tokens > kTokens;
  return p;
}

}  // namespace
}  // namespace large

template <Epilogue kEpilogue>
int launch_large(const Params& op, const Bf16* weight, int64_t weight_stride, float* workspace,
                 bool pdl, void* stream) {
  large::Params p = large::tile_params(op);
  const large::Shape shape{op.tokens, op.n, op.k, op.is_swiglu, sms()};
  const large::Plan plan = large::choose_plan<kEpilogue>(shape);
  if constexpr (kEpilogue == Epilogue::kAdd) {
    return large::launch_tiles<kEpilogue>(p, shape, plan, op.x, op.x_stride, weight, weight_stride,
                                          pdl, stream);
  } else {
    Bf16* const normed = reinterpret_cast<Bf16*>(workspace);
    float* const scale = workspace + static_cast<int64_t>(op.tokens) * op.k / 2;
    p.scale = scale;
    if (const int error = large::launch_norm(op, normed, scale, pdl, stream)) return error;
    // Behind the norm it may always start early: when that runs, all before it has ended, or it was
    // allowed to start early itself.
    return large::launch_tiles<kEpilogue>(p, shape, plan, normed, op.k, weight, weight_stride, true,
                                          stream);
  }
}

template int launch_large<Epilogue::kStore>(const Params&, const Bf16*, int64_t, float*, bool,
                                            void*);
template int launch_large<Epilogue::kAdd>(const Params&, const Bf16*, int64_t, float*, bool, void*);

}  // namespace photon::cuda::stream_linear
