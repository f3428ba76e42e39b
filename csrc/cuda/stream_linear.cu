// stream_linear: the kernel, and its launches by op, number of lines and shape.
#include "cuda/stream_linear.cuh"

#include <algorithm>

#include "cuda/dot.cuh"
#include "cuda/stream_epilogue.cuh"
#include "cuda/stream_linear.h"

namespace photon::cuda {
namespace stream_linear {
namespace {

// Where a block's barriers are. The first threads make them ready.
struct Barriers {
  Barrier *full, *empty, *x_full, *x_empty, *arrived;

  __device__ explicit Barriers(unsigned char* at)
      : full(reinterpret_cast<Barrier*>(at)),
        empty(full + kMaxStages),
        x_full(empty + kMaxStages),
        x_empty(x_full + kMaxXStages),
        arrived(x_empty + kMaxXStages) {}

  template <typename Size>
  __device__ void init(const Params& p) const {
    const int i = threadIdx.x;
    if (i < p.stages) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], kWarps * groups_of<Size>(p));
    }
    if (i < Size::kXStages) {
      init_barrier(&x_full[i], 1);
      init_barrier(&x_empty[i], kWarps);
    }
    if (i == 0) init_barrier(arrived, 1);
    if (i < kWarpSize) fence_barriers();
  }
};

// What comes before the first copy of a weight. The gains are on their way when this returns.
template <typename Size, bool kNormalizes>
__device__ void begin_block(const Params& p, const SharedLayout& at, const Barriers& barriers, const Share& share) {
  if (threadIdx.x == 0) {
    prefetch_panel_map(p.weight[share.part]);
    if (Size::kXStages > 0) prefetch_panel_map(p.lines_map);
  }
  barriers.init<Size>(p);
  __syncthreads();
  if (p.split * groups_of<Size>(p) > 1) {
    enter_cluster();
    meet_cluster();
  }
  if constexpr (kNormalizes) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k / 8; i += kThreads) {
      async_copy16(dynamic_shared() + at.gain + i * 16, p.gain + i * 8, true);
    }
    commit_copies();
  }
}

template <typename Size, Epilogue kEpilogue, bool kNormalizes>
__device__ void stream_block(const Params& p) {
  let_next_start();
  // Like the weights, the extent is from before the wait: loads of x that depended on another load there would take twice as long.
  const int extent = p.extent != nullptr ? load_fresh(p.extent) : p.lines;
  unsigned char* shared = dynamic_shared();
  const Share share = block_share<Size, kEpilogue>(p);
  const SharedLayout at(p.stages * p.stage_bytes, Size::kXBytes, Size::kLines, Size::kTiles, p.split > 1 ? p.most_tiles : 0, p.k,
                        kNormalizes, kEpilogue == Epilogue::kResidual);
  const Barriers barriers(shared + at.barriers);
  const Ring ring{shared + at.ring, barriers.full, barriers.empty, p.stages, p.stage_bytes};
  Filler<Size, kEpilogue> filler(p, share, ring);
  begin_block<Size, kNormalizes>(p, at, barriers, share);

  // A step without live lines reads no weights, and some blocks have no rows. They wait all the same: to the next kernel this one's end
  // means that all before have ended.
  const int lines = min(extent, p.lines), active = min(lines - share.first_line, Size::kLines);
  if (lines <= 0 || share.tiles == 0) {
    wait_copies<0>();
    return wait_for_earlier();
  }
  filler.fill();
  if (p.split > 1 && share.part == 0 && threadIdx.x == 0) {
    arrive_expecting(barriers.arrived, share.tiles * kTileRows * max(active, 0) * static_cast<int>(sizeof(float)));
  }
  Multiplier<Size, kNormalizes> multiplier(p, share, ring, shared + at.gain, active);
  const Finish<Size, kEpilogue, kNormalizes> finish{p, share, at, shared, barriers.arrived, static_cast<int>(threadIdx.x), active};
  XChunk<Size> x[Size::kAhead];
  Pass pass = pass_from(p, share, 0);
  const int passes = (share.tiles + p.pass_tiles - 1) / p.pass_tiles;
  XRing<Size> x_ring{p, share, shared + at.x_ring, barriers.x_full, barriers.x_empty, passes * share.chunks};
  wait_copies<0>();
  __syncthreads();  // all gains are there
  wait_for_earlier();
  multiplier.start(x);
  if (Size::kXStages > 0) x_ring.fill();

#pragma unroll 1
  while (true) {
    if constexpr (kEpilogue == Epilogue::kResidual) {
      if (pass.first > 0) __syncthreads();  // the residuals of the pass before have been read
      finish.fetch_residual(pass);
    }
    multiplier.run(x, x_ring, pass, filler);
    const bool is_last = pass.first + pass.tiles >= share.tiles;
    if (is_last && groups_of<Size>(p) > 1) leave_cluster();
    finish.run(multiplier, pass);
    if (is_last) break;
    pass = pass_from(p, share, pass.first + p.pass_tiles);
    multiplier.start(x);
  }
  if (groups_of<Size>(p) > 1) meet_cluster();  // neighbours arrive at this block's barriers until they have read all tiles
}

template <typename Size, Epilogue kEpilogue, bool kNormalizes>
__global__ void __launch_bounds__(kThreads, Size::kResidents) stream_kernel(const __grid_constant__ Params p) {
  if constexpr (kHopperCode) stream_block<Size, kEpilogue, kNormalizes>(p);
}

constexpr int64_t kMaxLines = 64;
constexpr int64_t kMaxColumns = 16384;                               // the gain lies in shared memory
constexpr int kSharedOfTwo = 113 * 1024, kSharedOfOne = 227 * 1024;  // bytes a block may have, where a multiprocessor holds two or one
constexpr int kMaxSplitPanels = 6;                                   // of a pair of blocks: what they exchange lies in shared memory
constexpr double kWorthSplitting = 1.1;
constexpr int64_t kFewSteps = 8;   // tiles of a block
constexpr int64_t kFewChunks = 2;  // of a block that has half a tile of each
// Two groups of lines make of two pairs one cluster. Of three pairs too, on six multiprocessors, of which four are used then.
constexpr int kMaxPeerTiles = 3 * kMaxSplitPanels / kTilePanels<Epilogue::kResidual>;

// The share of the multiprocessors' time that is used if `groups` of them divide `panels`.
double balance(int64_t panels, int64_t groups) { return static_cast<double>(panels) / (groups * ceil_div(panels, groups)); }

// Two parts of the columns, where that divides the rows better, or where a block would have one panel, which is half a tile, and many
// chunks. It depends on the shape and the device alone, and each part has a chunk.
int choose_split(int64_t n, int64_t k, int multiprocessors) {
  const int64_t panels = ceil_div(n, kPanelRows), pairs = multiprocessors / 2;
  if (pairs == 0 || k < 2 * kChunk || ceil_div(panels, pairs) > kMaxSplitPanels) return 1;
  if (panels <= multiprocessors && k > kFewChunks * kChunk) return 2;
  return balance(panels, pairs) > kWorthSplitting * balance(panels, multiprocessors) ? 2 : 1;
}

// The bytes that a ring has at least.
template <typename Size, bool kNormalizes, bool kAdds>
constexpr int kRingRoom =
    (Size::kResidents > 1 ? kSharedOfTwo : kSharedOfOne) -
    SharedLayout(0, Size::kXBytes, Size::kLines, Size::kTiles, kAdds ? kMaxPeerTiles : 0, kMaxColumns, kNormalizes, kAdds).end;

template <typename Size, Epilogue kEpilogue>
int launch_size(Params p, int multiprocessors, bool early, void* stream) {
  p.groups = static_cast<int>(ceil_div(p.lines, Size::kLines));
  const int clusters = std::max(multiprocessors / (p.split * p.groups), 1);
  constexpr bool kNormalizes = kEpilogue != Epilogue::kResidual, kAdds = kEpilogue == Epilogue::kResidual;
  static_assert(kRingRoom<Size, kNormalizes, kAdds> >= 2 * 2 * kPanelBytes, "a stage is filled while the one after it is read");
  static_assert(Size::kXStages != 1 && Size::kXStages <= kMaxXStages, "the same for x; and the barriers there are");
  const int64_t panels = ceil_div(p.n, kPanelRows), most_panels = ceil_div(panels, clusters),
                tiles = ceil_div(most_panels, kTilePanels<kEpilogue>);
  p.most_tiles = static_cast<int>(tiles);
  const auto shared_bytes = [&](int ring_bytes) {
    return SharedLayout(ring_bytes, Size::kXBytes, Size::kLines, Size::kTiles, p.split > 1 ? p.most_tiles : 0, p.k, kNormalizes, kAdds).end;
  };
  p.stage_bytes = kTilePanels<kEpilogue> > most_panels ? kPanelBytes : 2 * kPanelBytes;
  const int most_stages = ((Size::kResidents > 1 ? kSharedOfTwo : kSharedOfOne) - shared_bytes(0)) / p.stage_bytes;
  p.stages = std::min(most_stages, kMaxStages);
  p.panels_each = static_cast<int>(panels / clusters);
  p.panels_extra = static_cast<int>(panels % clusters);
  p.pass_tiles = static_cast<int>(ceil_div(tiles, ceil_div(tiles, Size::kTiles)));
  LaunchShape shape{clusters * p.split * p.groups, kThreads};
  // Where two fit, no third block of any kind does: what runs before and after spreads evenly.
  shape.shared_bytes = Size::kResidents > 1 ? kSharedOfTwo : shared_bytes(p.stages * p.stage_bytes);
  shape.cluster = static_cast<unsigned>(p.split * p.groups);
  shape.early = early;
  return launch(stream_kernel<Size, kEpilogue, kNormalizes>, shape, stream, p);
}

template <Epilogue kEpilogue>
int launch_lines(Params p, const Bf16* weight, int64_t weight_stride, bool early, void* stream) {
  const int count = multiprocessors();
  p.split = kEpilogue == Epilogue::kResidual ? choose_split(p.n, p.k, count) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, kChunk), p.split)) * kChunk;
  const int64_t rows = kEpilogue == Epilogue::kSwiglu ? 2 * static_cast<int64_t>(p.n) : p.n;
  for (int rank = 0; rank < p.split; ++rank) {
    const int column = rank * p.k_each;
    if (const int error = make_panel_map(p.weight[rank], weight + column, rows, std::min(p.k_each, p.k - column), weight_stride))
      return error;
  }
  const int64_t tiles = ceil_div(ceil_div(ceil_div(p.n, kPanelRows), count / p.split), kTilePanels<kEpilogue>);
  if (p.lines <= 8 && tiles <= 3) return launch_size<Size<1, 3, 4, 0, 2>, kEpilogue>(p, count, early, stream);
  if (p.lines <= 8) return launch_size<Size<1, 10, 2, 0, 2>, kEpilogue>(p, count, early, stream);
  if (const int error = make_panel_map(p.lines_map, p.x, p.lines, p.k, p.x_stride)) return error;
  // Up to 32 lines: two groups of 16 overlap with the kernels before and after, but read each tile twice from shared memory, which pays as
  // long as there are few.
  const int64_t steps = tiles * ceil_div(p.k_each, kChunk);
  if (p.lines <= 16 || (p.lines <= 32 && steps <= kFewSteps)) return launch_size<Size<2, 5, 1, 2, 2>, kEpilogue>(p, count, early, stream);
  return launch_size<Size<4, 6, 1, 3, 1>, kEpilogue>(p, count, early, stream);
}

// What the three ops' params have in common; `out` and the rest are the op's own.
template <typename OpParams>
Params common_params(const OpParams& op, int64_t n, int64_t k) {
  Params p = {};
  p.x = static_cast<const Bf16*>(op.x);
  p.bias = static_cast<const Bf16*>(op.bias);
  p.extent = op.extent;
  p.x_stride = static_cast<int>(op.x_stride);
  p.lines = static_cast<int>(op.lines);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.per_column = 1.0f / static_cast<float>(k);
  return p;
}

// Of rows that lie apart, and near enough for offsets of a few lines in 32 bits.
bool is_stride(int64_t stride) { return stride > 0 && stride <= INT32_MAX / kLineTile; }

template <typename OpParams>
bool fits(const OpParams& p, int64_t n, int64_t k, int64_t weight_stride) {
  return p.fast && p.dtype == DType::kBF16 && p.lines > 0 && p.lines <= kMaxLines && n > 0 && k > 0 && k <= kMaxColumns &&
         k % kBlockColumns == 0 && 2 * n < INT32_MAX - 16 && is_stride(p.x_stride) && is_stride(weight_stride) && is_vector_aligned(p.x) &&
         is_vector_aligned(p.weight) && are_whole_vectors(p.dtype, p.x_stride, weight_stride) && fast_kernels_run();
}

}  // namespace
}  // namespace stream_linear

bool has_fast_kernels() { return fast_kernels_run(); }

bool streams(const NormLinearParams& p) {
  return stream_linear::fits(p, p.n, p.k, p.weight_stride) && stream_linear::is_stride(p.out_stride) && is_vector_aligned(p.norm_weight);
}

bool streams(const LinearResidualParams& p) {
  return stream_linear::fits(p, p.n, p.k, p.weight_stride) && stream_linear::is_stride(p.residual_stride) && p.n % kPanelRows == 0 &&
         is_vector_aligned(p.residual) && are_whole_vectors(p.dtype, p.residual_stride);
}

bool streams(const NormSwigluParams& p) {
  return stream_linear::fits(p, p.intermediate, p.hidden, p.hidden) && stream_linear::is_stride(p.out_stride) &&
         is_vector_aligned(p.norm_weight);
}

int stream_norm_linear(const NormLinearParams& op, void* stream) {
  stream_linear::Params p = stream_linear::common_params(op, op.n, op.k);
  p.out = static_cast<Bf16*>(op.out);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.out_stride = static_cast<int>(op.out_stride);
  p.eps = op.eps;
  return stream_linear::launch_lines<stream_linear::Epilogue::kStore>(p, static_cast<const Bf16*>(op.weight), op.weight_stride, op.early,
                                                                      stream);
}

int stream_linear_residual(const LinearResidualParams& op, void* stream) {
  stream_linear::Params p = stream_linear::common_params(op, op.n, op.k);
  p.out = static_cast<Bf16*>(op.residual);
  p.out_stride = static_cast<int>(op.residual_stride);
  return stream_linear::launch_lines<stream_linear::Epilogue::kResidual>(p, static_cast<const Bf16*>(op.weight), op.weight_stride, op.early,
                                                                         stream);
}

int stream_norm_swiglu(const NormSwigluParams& op, void* stream) {
  stream_linear::Params p = stream_linear::common_params(op, op.intermediate, op.hidden);
  p.out = static_cast<Bf16*>(op.out);
  p.gain = static_cast<const Bf16*>(op.norm_weight);
  p.out_stride = static_cast<int>(op.out_stride);
  p.eps = op.eps;
  return stream_linear::launch_lines<stream_linear::Epilogue::kSwiglu>(p, static_cast<const Bf16*>(op.weight), op.hidden, op.early, stream);
}

}  // namespace photon::cuda
