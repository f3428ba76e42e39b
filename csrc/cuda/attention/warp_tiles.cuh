// Tiles of keys and values on their way into the shared memory of a one-warp CTA of split attention
// (warp_attention.cu).
//
// There are four tiles of 16 positions: those of one step. Each has the keys first and then the
// values of the same positions, so that keys complete the even phases of its barrier and values the
// odd ones. One tensor copy brings a tile. It also brings what the page has at positions that the
// context does not: nobody looks at such keys, and such values are cleared. A row reads a tile
// once a step, so L2 makes room of it first; without that the copies of many tokens arrive a tenth
// slower.
#pragma once
#include "cuda/attention/split_attention.cuh"
#include "cuda/attention/split_ranges.cuh"
#include "cuda/attention/tile_tensors.cuh"
#include "cuda/residency.cuh"

namespace photon::cuda {

constexpr int kTileTokens = kRunTokens;

// How a one-warp CTA divides a head.
template <int kHeadDim>
struct WarpShape {
  static constexpr int kStepTokens = 64, kItemBits = 6;
  static constexpr int kTiles = kStepTokens / kTileTokens;  // of a step
  static constexpr int kFragments = kHeadDim / 16, kVectors = kHeadDim / kPack;
  static constexpr int kSlices = kHeadDim / kKBlockColumns;
  static constexpr int kSliceBytes = kTileTokens * kKBlockColumns * 2;
  static constexpr int kTileBytes = kSlices * kSliceBytes;
  static constexpr int kSliceVectors = kKBlockColumns / kPack;

  // Where a vector of a tile is; those of the slice's other columns by an exclusive or.
  __device__ static int place(int token, int vector) {
    return vector / kSliceVectors * kSliceBytes + token * kKBlockColumns * 2 +
           (vector % kSliceVectors ^ token % 8) * 16;
  }
  // How far a fragment of 16 columns is from the first one: to be added, and to be xor-ed.
  __device__ static int fragment_slice(int fragment) { return fragment / 4 * kSliceBytes; }
  __device__ static int fragment_vectors(int fragment) { return fragment % 4 * 32; }
};

template <int kHeadDim>
struct WarpShared {
  using Shape = WarpShape<kHeadDim>;
  static constexpr int kQueries = 4;           // query heads of a KV head, at most
  static constexpr int kPitch = kHeadDim + 8;  // so that rows begin in different banks
  static constexpr int kRanges = 3;  // the one worked on, that of the next step, and of its next

  alignas(1024) unsigned char tiles[Shape::kTiles][Shape::kTileBytes];
  union {
    alignas(16) Bf16 queries[kQueries][kPitch];  // on their way to the lanes
    alignas(16) float sums[kQueries][kPitch];    // of the splits so far
  };
  Weight weights[kQueries];  // their weights
  alignas(16) Bf16 new_k[kHeadDim];
  alignas(16) Bf16 new_v[kHeadDim];
  Barrier full[Shape::kTiles];
  RangeCursor ranges[kRanges];
  TokenOrder order;

  // All lanes must call it first.
  __device__ void open(const TileTensors& tensors) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (Barrier& barrier : full) init_barrier(&barrier, 1);
      fence_barriers();
      prefetch_row_tile_map(tensors.k_map);
      prefetch_row_tile_map(tensors.v_map);
    }
    __syncwarp();
  }
};

// Puts the new key or value into its row of a tile.
template <int kHeadDim>
__device__ inline void put_row(unsigned char* tile, int token, const Bf16* row) {
  using Shape = WarpShape<kHeadDim>;
  const int vector = threadIdx.x % kWarpSize;
  if (vector < Shape::kVectors) {
    *reinterpret_cast<uint4*>(tile + Shape::place(token, vector)) =
        reinterpret_cast<const uint4*>(row)[vector];
  }
}

// Clears a tile's rows from `first` on, whose weights are 0: 0 times what is there may be NaN.
template <int kHeadDim>
__device__ inline void clear_rows(unsigned char* tile, int first) {
  using Shape = WarpShape<kHeadDim>;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < (kTileTokens - first) * Shape::kVectors;
       i += kWarpSize) {
    *reinterpret_cast<uint4*>(
        tile + Shape::place(first + i / Shape::kVectors, i % Shape::kVectors)) = {0, 0, 0, 0};
  }
}

// What requests tiles: those of the step that is worked on, and then of the next one.
template <int kHeadDim>
class TileLoader {
 public:
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  __device__ TileLoader(const SplitGrid& grid, const TileTensors& tensors,
                        const CtaRanges<true>& ranges, const RangeCursor& first, Shared& shared)
      : grid_(grid), tensors_(tensors), ranges_(ranges), shared_(shared) {
    open_range(first);
    if (has_more_) request_page();
  }

  // Goes on to the next step, which has no tiles if there is none.
  __device__ void advance() {
    loaded_ = 0;
    is_open_ = has_more_;
    if (!has_more_) return;
    const int32_t at = position();
    page_of_tile_ = page_;
    token_of_tile_ = at - (grid_.cache.page_size.divides(at) * grid_.cache.page_size.of);
    head_of_tile_ = kv_head_;
    const bool is_there =
        static_cast<uint32_t>(page_) < static_cast<uint32_t>(grid_.cache.num_pages);
    loaded_ = __ballot_sync(kFullWarp, is_there) % (1u << Shape::kTiles);
    at_ += Shape::kStepTokens;
    if (at_ >= end_) open_next_range();
    if (has_more_) request_page();
  }

  // A bit for each tile of the step that is in the cache.
  __device__ uint32_t loaded() const { return loaded_; }
  // Whether there was no such step: all keys and values have been requested.
  __device__ bool is_done() const { return !is_open_; }

  // Of kTiles tiles from `first` on, those that are in the cache. All lanes must be done with what
  // the tiles hold.
  template <int kTiles>
  __device__ void request_keys(int first) const {
    request<kTiles>(first, tensors_.k_map, tensors_.k);
  }
  template <int kTiles>
  __device__ void request_values(int first) const {
    request<kTiles>(first, tensors_.v_map, tensors_.v);
  }

 private:
  template <int kTiles>
  __device__ void request(int first, const RowTileMap& map, const TileTensor& tensor) const {
    const uint32_t wanted = loaded_ >> first & ((1u << kTiles) - 1);
    if (wanted == 0) return;
    const int own = tensor.row(page_of_tile_, head_of_tile_, token_of_tile_);
    int rows[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) rows[i] = __shfl_sync(kFullWarp, own, first + i);
    if (!is_elected()) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if ((wanted >> i & 1) == 0) continue;
      const int tile = first + i;
      arrive_expecting(&shared_.full[tile], Shape::kTileBytes);
      copy_row_tile(shared_.tiles[tile], map, rows[i], head_of_tile_ * tensor.head_slices,
                    &shared_.full[tile], evict_first());
    }
  }

  // Of the tile that a lane looks after: the first lanes have one each.
  __device__ int32_t position() const {
    return at_ + static_cast<int32_t>(threadIdx.x % kWarpSize % Shape::kTiles) * kTileTokens;
  }

  __device__ void request_page() {
    const int32_t at = position();
    page_ = grid_.cache.request(grid_.cache.pages_of(row_), row_, at, at < end_);
  }

  __device__ void open_range(const RangeCursor& range) {
    if (threadIdx.x % kWarpSize == 0) shared_.ranges[opened_ % Shared::kRanges] = range;
    __syncwarp();
    has_more_ = range.has_range(grid_);
    at_ = range.begin_position(grid_);
    end_ = range.end_position(grid_);
    kv_head_ = static_cast<int32_t>(grid_.tiles.divides(range.split_group));
    row_ = range.token.row;
  }

  __device__ void open_next_range() {
    RangeCursor range = shared_.ranges[opened_ % Shared::kRanges];
    ranges_.advance(range);
    ++opened_;
    open_range(range);
  }

  const SplitGrid& grid_;
  const TileTensors& tensors_;
  const CtaRanges<true>& ranges_;
  Shared& shared_;
  int opened_ = 0;         // the tile range of the step after the one that tiles are requested of
  bool has_more_;          // there is such a step
  bool is_open_ = false;   // there was the step before it
  int32_t at_, end_;       // positions: of that step, and where its tile range ends
  int32_t kv_head_, row_;  // of that tile range
  int32_t page_;           // of a tile of that step
  int32_t page_of_tile_ = 0, token_of_tile_ = 0, head_of_tile_ = 0;  // of the step before it
  uint32_t loaded_ = 0;  // a bit for each tile of that step that is in the cache
};

}  // namespace photon::cuda
