// Split attention of many tokens: a CTA is one warp, which takes whole steps alone. Of many
// tokens there are tile ranges enough to fill every SM with such warps. None of them waits for
// another one, and what four warps would each work out is worked out once: per tile range, the
// instructions of all warps together are a third of those of split_attention.cuh. The splits, the
// tiles and the order of every sum are the same, and so are the bits.
//
// Shared memory has four tiles of 16 positions. Each has the keys of a tile of the step, and then
// the values that go with them, so that keys complete the even phases of its barrier and values the
// odd ones. One tensor copy brings a tile. What it brings of positions that are not in the context
// is not looked at (keys) or cleared (values).
#pragma once
#include "cuda/half_tile_map.cuh"
#include "cuda/rotate.cuh"
#include "cuda/split_attention.cuh"

namespace photon::cuda {

// Keys or values of the cache as a tensor of rows of a token's stride: where pages and heads begin.
struct TileTensor {
  int page_rows, head_rows, head_slices;

  // Whether strides (in elements) are whole rows, or whole slices within a row.
  static bool fits(int64_t page, int64_t token, int64_t head, int64_t kv_heads, int64_t pages) {
    const bool is_row = token > 0 && token % kSliceColumns == 0 && page % token == 0 &&
                        page / token * pages < INT32_MAX / 2;
    return is_row && (head % token == 0 ||
                      (head % kSliceColumns == 0 && head * kv_heads <= token));
  }

  TileTensor(int64_t page, int64_t token, int64_t head)
      : page_rows(static_cast<int>(page / token)),
        head_rows(static_cast<int>(head / token)),
        head_slices(static_cast<int>(head % token / kSliceColumns)) {}

  __device__ int row(int32_t page, int32_t head, int32_t token) const {
    return page * page_rows + head * head_rows + token;
  }
};

struct TileTensors {
  HalfTileMap k_map, v_map;
  TileTensor k, v;
};

template <int kHeadDim>
struct WarpShape {
  static constexpr int kTiles = kWarpGroupTokens / kTileTokens;  // of a step
  static constexpr int kStepTokens = kWarpGroupTokens, kItemBits = 6;
  static constexpr int kFragments = kHeadDim / 16, kVectors = kHeadDim / kPack;
  static constexpr int kSlices = kHeadDim / kSliceColumns;
  static constexpr int kSliceBytes = kTileTokens * kSliceColumns * 2;
  static constexpr int kTileBytes = kSlices * kSliceBytes;
  static constexpr int kSliceVectors = kSliceColumns / kPack;

  // Where a vector of a tile is; those of the slice's other columns by an exclusive or.
  __device__ static int place(int token, int vector) {
    return vector / kSliceVectors * kSliceBytes + token * kSliceColumns * 2 +
           (vector % kSliceVectors ^ token % 8) * 16;
  }
  // How far a fragment of 16 columns is from the first one: to be added, and to be xor-ed.
  __device__ static int fragment_slice(int fragment) { return fragment / 4 * kSliceBytes; }
  __device__ static int fragment_vectors(int fragment) { return fragment % 4 * 32; }
};

template <int kHeadDim>
struct WarpShared {
  using Shape = WarpShape<kHeadDim>;
  static constexpr int kQueries = 4;
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
};

// What requests tiles: those of the step that is worked on, and then of the next one.
template <int kHeadDim>
class TileLoader {
 public:
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  __device__ TileLoader(const SplitGrid& grid, const TileTensors& tensors, const RangeCursor& range,
                        Shared& shared)
      : grid_(grid), tensors_(tensors), shared_(shared) {
    open_range(range);
    if (has_more_) request_page();
  }

  // Goes on to the next step, which has no tiles if there is none.
  __device__ void advance(const CtaSplits& share) {
    loaded_ = 0;
    is_open_ = has_more_;
    if (!has_more_) return;
    const int32_t at = position();
    page_of_tile_ = page_;
    token_of_tile_ = at - (grid_.cache.page_size.divides(at) * grid_.cache.page_size.of);
    head_of_tile_ = kv_head_;
    const bool is_there = static_cast<uint32_t>(page_) < static_cast<uint32_t>(grid_.cache.num_pages);
    loaded_ = __ballot_sync(kFullWarp, is_there) % (1u << Shape::kTiles);
    at_ += Shape::kStepTokens;
    if (at_ >= end_) open_next_range(share);
    if (has_more_) request_page();
  }

  __device__ bool is_loaded(int tile) const { return (loaded_ >> tile & 1) != 0; }
  __device__ uint32_t loaded() const { return loaded_; }
  // Whether there was no such step: all keys and values have been requested.
  __device__ bool is_done() const { return !is_open_; }

  // All lanes must be done with what the tile holds.
  __device__ void request_keys(int tile) const { request(tile, tensors_.k_map, tensors_.k); }
  __device__ void request_values(int tile) const { request(tile, tensors_.v_map, tensors_.v); }

 private:
  __device__ void request(int tile, const HalfTileMap& map, const TileTensor& tensor) const {
    const int row =
        __shfl_sync(kFullWarp, tensor.row(page_of_tile_, head_of_tile_, token_of_tile_), tile);
    if (!is_elected()) return;
    arrive_expecting(&shared_.full[tile], Shape::kTileBytes);
    copy_half_tile(shared_.tiles[tile], map, row, head_of_tile_ * tensor.head_slices,
                   &shared_.full[tile], evict_normal());
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

  __device__ void open_next_range(const CtaSplits& share) {
    RangeCursor range = shared_.ranges[opened_ % Shared::kRanges];
    range.next(grid_, share);
    ++opened_;
    open_range(range);
  }

  const SplitGrid& grid_;
  const TileTensors& tensors_;
  Shared& shared_;
  int opened_ = 0;         // the tile range of the step after the one that tiles are requested of
  bool has_more_;          // there is such a step
  bool is_open_ = false;   // there was the step before it
  int32_t at_, end_;       // positions: of that step, and where its tile range ends
  int32_t kv_head_, row_;  // of that tile range
  int32_t page_;           // of a tile of that step
  int32_t page_of_tile_ = 0, token_of_tile_ = 0, head_of_tile_ = 0;  // of the step before it
  uint32_t loaded_ = 0;    // a bit for each tile of that step that is in the cache
};

// A tile range's rotated queries, as a lane holds them for matrix instructions: query g, columns 2t,
// 2t + 1, 2t + 8 and 2t + 9 of each fragment.
template <int kHeadDim>
struct WarpQueries {
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  uint32_t at[Shape::kFragments][2];

  // Norm and rotation; and the new key and value into the cache, where the tile range has the
  // context's last position (see NewVectors). Returns whether the token has a place and angles.
  __device__ bool prepare(const RopeParams& rope, const SplitGrid& grid, const RangeCursor& range,
                          Shared& shared) {
    const SplitGroupHeads heads = SplitGroupHeads::of(grid, range.split_group, kHalfQueries);
    const bool can_be = can_rotate(rope, range.token);
    const int32_t page = grid.cache.request(grid.cache.pages_of(range.token.row), range.token.row,
                                            range.token.position, can_be);
    LaneCosSin angles;
    if (can_be) angles = LaneCosSin::load(rope, range.token.position, kHeadDim);
    const auto query_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.q_norm), kHeadDim,
                                                  rope.q_norm != nullptr);
    const auto key_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.k_norm), kHeadDim,
                                                rope.k_norm != nullptr);
    const int32_t owned = range.new_position() >= 0 ? range.new_position() : range.length - 1;
    const KvPlaces own = grid.cache.places(page, heads.kv_head, range.token.position);
    const bool is_live = own.k != kAbsent;
    const bool owns_new =
        is_live && owned >= range.begin_position(grid) && owned < range.end_position(grid);
    wait_for_earlier();
    const int vectors = heads.count + (owns_new ? 2 : 0);  // the key and the value come last
    LanePairs<Bf16> loaded[Shared::kQueries + 2];
#pragma unroll
    for (int j = 0; j < Shared::kQueries + 2; ++j) {
      const int i = j - heads.count;
      const Bf16* vector = i < 0    ? grid.q.at(range.index, heads.first + j)
                           : i == 0 ? grid.k.at(range.index, heads.kv_head)
                                    : grid.v.at(range.index, heads.kv_head);
      loaded[j] = LanePairs<Bf16>::load(vector, kHeadDim, j < vectors);
    }
#pragma unroll 1
    for (int j = 0; j < vectors; ++j) {
      const int i = j - heads.count;
      LanePairs<Bf16> v = loaded[0], norm = query_norm;
#pragma unroll
      for (int other = 1; other < Shared::kQueries + 2; ++other)
        v.replace_if(other == j, loaded[other]);
      norm.replace_if(i >= 0, key_norm);
      const bool normed = (i >= 0 ? rope.k_norm : rope.q_norm) != nullptr;
      if (i <= 0) v = rotate_pairs(v, normed, norm, angles, rope.eps, kHeadDim);
      v.store(i < 0 ? shared.queries[j] : i == 0 ? shared.new_k : shared.new_v, kHeadDim);
      if (i >= 0) {
        v.store((i == 0 ? grid.cache.k : grid.cache.v) +
                    static_cast<size_t>(i == 0 ? own.k : own.v) * kPack,
                kHeadDim);
      }
    }
    __syncwarp();
    take(shared);
    __syncwarp();
    return is_live;
  }

 private:
  // Rows without a query get what is there: see split_attention.cuh.
  __device__ void take(const Shared& shared) {
    const LaneId lane = lane_id();
    const Bf16* row = shared.queries[lane.g % Shared::kQueries] + 2 * lane.t;
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        at[fragment][i] = *reinterpret_cast<const uint32_t*>(row + fragment * 16 + 8 * i);
    }
  }
};

// The weights of a step, as a lane holds them: of query g, columns 2t, 2t + 1, 2t + 8 and 2t + 9 of
// each tile; and each tile's highest score, times log2(e).
template <int kHeadDim>
struct StepWeights {
  using Shape = WarpShape<kHeadDim>;

  uint32_t at[Shape::kTiles][2];
  float high[Shape::kTiles];

  __device__ void leave_out(int tile) {
    at[tile][0] = at[tile][1] = 0;
    high[tile] = -INFINITY;
  }

  // As score_tile() and weigh_tile(). `present`: a bit for each of the tile's positions.
  __device__ void weigh(int tile, const WarpQueries<kHeadDim>& queries, const unsigned char* keys,
                        uint32_t present, float scale_log2) {
    const int lane = threadIdx.x % kWarpSize,
              first = Shape::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float parts[2][2][4] = {};
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
      uint32_t key[4];
      load_matrices(key, keys + Shape::fragment_slice(fragment) +
                             (first ^ Shape::fragment_vectors(fragment)));
      const uint32_t query[4] = {queries.at[fragment][0], 0, queries.at[fragment][1], 0};
      multiply_bf16(parts[fragment % 2][0], query, {key[0], key[1]});
      multiply_bf16(parts[fragment % 2][1], query, {key[2], key[3]});
    }
    present >>= 2 * lane_id().t;
    float weights[4], highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_there = (present >> (i / 2 * 8 + i % 2) & 1) != 0;
      const float score = parts[0][i / 2][i % 2] + parts[1][i / 2][i % 2];
      weights[i] = is_there ? score * scale_log2 : -INFINITY;
      highest = fmaxf(highest, weights[i]);
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, offset));
#pragma unroll
    for (float& weight : weights) weight = weight2(weight, highest);
    at[tile][0] = pack_bf16(weights[0], weights[1]);
    at[tile][1] = pack_bf16(weights[2], weights[3]);
    high[tile] = highest;
  }
};

// What a lane holds of a split's sums: for query g, dims 8 j + 2t and 8 j + 2t + 1 for each j.
template <int kHeadDim>
struct WarpSums {
  using Shape = WarpShape<kHeadDim>;
  static constexpr int kPieces = kHeadDim / 8;

  PartSoftmax<2 * kPieces> part;

  // Brings the sums to the highest score of all tiles so far.
  __device__ void raise_high(const StepWeights<kHeadDim>& weights) {
    float high = part.weight.high;
#pragma unroll
    for (const float of_tile : weights.high) high = fmaxf(high, of_tile);
    const float keep = weight2(part.weight.high, high);
    part.weight = {high, keep * part.weight.sum};
#pragma unroll
    for (float& v : part.sum) v *= keep;
  }

  // Adds a tile: its weights times its values.
  __device__ void add_tile(const StepWeights<kHeadDim>& of_step, int tile,
                           const unsigned char* values) {
    constexpr uint32_t kOnes = 0x3f803f80;
    const int lane = threadIdx.x % kWarpSize, first = Shape::place(lane % 16, lane / 16);
    const uint32_t weights[4] = {of_step.at[tile][0], 0, of_step.at[tile][1], 0};
    const float share = weight2(of_step.high[tile], part.weight.high);
    float weight[4] = {};
    multiply_bf16(weight, weights, {kOnes, kOnes});
    part.weight.sum = fmaf(share, weight[0], part.weight.sum);
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
      uint32_t pair[4];
      load_matrices_transposed(pair, values + Shape::fragment_slice(fragment) +
                                         (first ^ Shape::fragment_vectors(fragment)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float product[4] = {};
        multiply_bf16(product, weights, {pair[2 * i], pair[2 * i + 1]});
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& sum = part.sum[2 * (2 * fragment + i) + j];
          sum = fmaf(share, product[j], sum);
        }
      }
    }
  }
};

// The result of a tile range, and where it goes; see RangeResults.
template <int kHeadDim>
struct WarpResults {
  using Sums = WarpSums<kHeadDim>;
  static constexpr int kAtOnce = 7;  // splits in flight

  const SplitGrid& grid;
  const Partials& partials;
  const RangeCursor& range;
  SplitGroupHeads heads;
  bool is_live;

  __device__ int64_t partial_at(int query, int split) const {
    const int64_t head = static_cast<int64_t>(range.index) * grid.q_heads + heads.first + query;
    return head * grid.splits.of + split;
  }

  __device__ uint32_t* out(int query, int dim) const {
    return reinterpret_cast<uint32_t*>(grid.out.at(range.index, heads.first + query) + dim);
  }

  __device__ static float share_of(const Weight& weight) {
    return weight.sum == 0.0f ? 0.0f : 1.0f / weight.sum;
  }

  // The split-KV group's result.
  __device__ void write(const Sums& sums) const {
    const LaneId lane = lane_id();
    if (lane.g >= heads.count) return;
    const float share = share_of(sums.part.weight);
#pragma unroll
    for (int piece = 0; piece < Sums::kPieces; ++piece) {
      const uint32_t pair =
          pack_bf16(share * sums.part.sum[2 * piece], share * sums.part.sum[2 * piece + 1]);
      *out(lane.g, piece * 8 + 2 * lane.t) = is_live ? pair : 0;
    }
  }

  // Adds what has been kept of the splits before to `sums`.
  __device__ void add_kept(Sums& sums, const WarpShared<kHeadDim>& shared) const {
    const LaneId lane = lane_id();
    if (lane.g >= heads.count) return;
    Sums kept;
    kept.part.weight = shared.weights[lane.g];
#pragma unroll
    for (int piece = 0; piece < Sums::kPieces; ++piece) {
      const float2 pair =
          *reinterpret_cast<const float2*>(&shared.sums[lane.g][piece * 8 + 2 * lane.t]);
      kept.part.sum[2 * piece] = pair.x;
      kept.part.sum[2 * piece + 1] = pair.y;
    }
    kept.part.add(sums.part);
    sums = kept;
  }

  // Keeps the sums of the splits so far, which the next split's are added to.
  __device__ void keep(const Sums& sums, WarpShared<kHeadDim>& shared) const {
    const LaneId lane = lane_id();
    __syncwarp();
    if (lane.g < heads.count) {
#pragma unroll
      for (int piece = 0; piece < Sums::kPieces; ++piece) {
        *reinterpret_cast<float2*>(&shared.sums[lane.g][piece * 8 + 2 * lane.t]) = {
            sums.part.sum[2 * piece], sums.part.sum[2 * piece + 1]};
      }
      if (lane.t == 0) shared.weights[lane.g] = sums.part.weight;
    }
    __syncwarp();
  }

  // Leaves one split's result for the warp that merges.
  __device__ void leave(const Sums& sums, int split) const {
    const LaneId lane = lane_id();
    if (lane.g >= heads.count) return;
    const int64_t at = partial_at(lane.g, split);
#pragma unroll
    for (int piece = 0; piece < Sums::kPieces; ++piece) {
      *reinterpret_cast<float2*>(partials.sums + at * kHeadDim + piece * 8 + 2 * lane.t) = {
          sums.part.sum[2 * piece], sums.part.sum[2 * piece + 1]};
    }
    if (lane.t == 0) partials.weights[at] = sums.part.weight;
  }

  // Whether this warp is the last of its split-KV group to arrive. If so, it sees what all of them
  // have left.
  __device__ bool is_last_to_arrive(int blocks) const {
    const unsigned last = static_cast<unsigned>(blocks) - 1;
    unsigned before = 0;
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      before = count_round(
          partials.arrived + range.index * grid.token_split_groups.of + range.split_group, last);
    }
    return __shfl_sync(kFullWarp, before, 0) == last;
  }

  // Merges the splits in order, a pair of dims a lane.
  __device__ void merge() const {
    constexpr int kPairs = kHeadDim / 2;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < heads.count * kPairs; i += kWarpSize) {
      const int query = i / kPairs, dim = i % kPairs * 2;
      PartSoftmax<2> total = left(query, 0, dim);
#pragma unroll 1
      for (int from = 1; from < range.cut.splits; from += kAtOnce) {
        PartSoftmax<2> parts[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          parts[j] = left(query, min(from + j, range.cut.splits - 1), dim);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (from + j < range.cut.splits) total.add(parts[j]);
        }
      }
      const float share = share_of(total.weight);
      const uint32_t pair = pack_bf16(share * total.sum[0], share * total.sum[1]);
      *out(query, dim) = is_live ? pair : 0;
    }
  }

 private:
  __device__ PartSoftmax<2> left(int query, int split, int dim) const {
    const int64_t at = partial_at(query, split);
    const float2 sums = *reinterpret_cast<const float2*>(partials.sums + at * kHeadDim + dim);
    return {partials.weights[at], {sums.x, sums.y}};
  }
};

// Puts the new key or value into its row of a tile.
template <int kHeadDim>
__device__ void patch_row(unsigned char* tile, int token, const Bf16* row) {
  using Shape = WarpShape<kHeadDim>;
  const int vector = threadIdx.x % kWarpSize;
  if (vector < Shape::kVectors) {
    *reinterpret_cast<uint4*>(tile + Shape::place(token, vector)) =
        reinterpret_cast<const uint4*>(row)[vector];
  }
}

// Clears a tile's rows from `first` on, whose weights are 0: 0 times what is there may be NaN.
template <int kHeadDim>
__device__ void clear_rows(unsigned char* tile, int first) {
  using Shape = WarpShape<kHeadDim>;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < (kTileTokens - first) * Shape::kVectors;
       i += kWarpSize) {
    *reinterpret_cast<uint4*>(
        tile + Shape::place(first + i / Shape::kVectors, i % Shape::kVectors)) = {0, 0, 0, 0};
  }
}

// A warp's tile ranges.
template <int kHeadDim>
__device__ void attend_ranges_alone(const RopeParams& rope, float scale, const SplitGrid& grid,
                                    const Partials& partials, const TileTensors& tensors) {
  using Shape = WarpShape<kHeadDim>;
  WarpShared<kHeadDim>& shared = *reinterpret_cast<WarpShared<kHeadDim>*>(dynamic_shared());
  if (threadIdx.x == 0) {
#pragma unroll
    for (Barrier& barrier : shared.full) init_barrier(&barrier, 1);
    fence_barriers();
    prefetch_half_tile_map(tensors.k_map);
    prefetch_half_tile_map(tensors.v_map);
  }
  __syncwarp();
  TokenCut own;
  const CtaSplits share = CtaSplits::of_cta(grid, own);
  RangeCursor first;
  first.seek(grid, share, own);
  TileLoader<kHeadDim> loader(grid, tensors, first, shared);
  loader.advance(share);
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile) {
    if (loader.is_loaded(tile)) loader.request_keys(tile);
  }
  const float scale_log2 = scale * kLog2E;
  WarpQueries<kHeadDim> queries = {};
  WarpSums<kHeadDim> sums;
  RangeSteps steps = {};
  int range_number = 0, blocks = 0;
  int32_t new_position = -1;
  bool is_begin = true, is_live = false;
#pragma unroll 1
  for (;;) {
    const RangeCursor& range = shared.ranges[range_number % WarpShared<kHeadDim>::kRanges];
    if (is_begin) {
      if (!range.has_range(grid)) break;
      is_live = queries.prepare(rope, grid, range, shared);
      blocks = range.ranges(share);
      steps = range.steps(grid);
      new_position = range.new_position();
      sums.part.clear();
    }
    const uint32_t loaded = loader.loaded();
    StepWeights<kHeadDim> weights;
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      weights.leave_out(tile);
      if ((loaded >> tile & 1) == 0) continue;
      const int32_t at = steps.at + tile * kTileTokens;
      const unsigned new_token = new_position - at;
      const int here = min(steps.end - at, kTileTokens);
      wait_barrier(&shared.full[tile], 0);
      if (new_token < kTileTokens) {
        patch_row<kHeadDim>(shared.tiles[tile], new_token, shared.new_k);
        fence_async_shared();
        __syncwarp();
      }
      weights.weigh(tile, queries, shared.tiles[tile], (1u << here) - 1, scale_log2);
      __syncwarp();
      loader.request_values(tile);
    }
    loader.advance(share);
    if (loader.is_done()) let_next_start();
    sums.raise_high(weights);
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      if ((loaded >> tile & 1) != 0) {
        const int32_t at = steps.at + tile * kTileTokens;
        const unsigned new_token = new_position - at;
        const int here = min(steps.end - at, kTileTokens);
        wait_barrier(&shared.full[tile], 1);
        if (here < kTileTokens || new_token < kTileTokens) {
          clear_rows<kHeadDim>(shared.tiles[tile], here);
          if (new_token < kTileTokens)
            patch_row<kHeadDim>(shared.tiles[tile], new_token, shared.new_v);
          fence_async_shared();
          __syncwarp();
        }
        sums.add_tile(weights, tile, shared.tiles[tile]);
        __syncwarp();
      }
      if (loader.is_loaded(tile)) loader.request_keys(tile);
    }
    const int split = steps.split;
    is_begin = false;
    if (!steps.advance(Shape::kStepTokens)) continue;
    const WarpResults<kHeadDim> results = {
        grid, partials, range, SplitGroupHeads::of(grid, range.split_group, kHalfQueries), is_live};
    if (blocks > 1) {
      results.leave(sums, split);
    } else {
      if (split != range.split) results.add_kept(sums, shared);
      if (steps.is_done()) {
        results.write(sums);
      } else {
        results.keep(sums, shared);
      }
    }
    sums.part.clear();
    if (!steps.is_done()) continue;
    if (blocks > 1 && results.is_last_to_arrive(blocks)) results.merge();
    is_begin = true;
    ++range_number;
    __syncwarp();
  }
  wait_for_earlier();
  if (share.has_dead) clear_dead_tokens<kHeadDim>(grid);
}

}  // namespace photon::cuda
