// One step of a one-warp CTA: scores, weights and sums of four tiles, in the order of summation of
// split_attention.cuh. What the warps of a CTA hand over to each other there stays in registers
// here: a lane's scores of two instructions are what it needs as the left operand of the next one.
#pragma once
#include "cuda/attention/rotate.cuh"
#include "cuda/attention/warp_tiles.cuh"

namespace photon::cuda {

// The queries of a one-warp CTA's tile range, and the new key and value: norm, rotation, and their
// places.

// A tile range's rotated queries, as a lane holds them for matrix instructions: query g, columns
// 2t, 2t + 1, 2t + 8 and 2t + 9 of each fragment.
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
    take(shared, heads.count);
    __syncwarp();
    return is_live;
  }

 private:
  // Rows without a query get the last one.
  __device__ void take(const Shared& shared, int queries) {
    const LaneId lane = lane_id();
    const Bf16* row = shared.queries[min(lane.g, queries - 1)] + 2 * lane.t;
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

  // As score_tile() and weigh_tile(), one tile at a time. Of its positions `tokens` are in the
  // context.
  template <int kTiles>
  __device__ void score(int tile, const WarpQueries<kHeadDim>& queries, const unsigned char* keys,
                        int32_t tokens, float scale_log2) {
    static_assert(kTiles == 1);
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
    const uint32_t present = ((1u << min(tokens, kTileTokens)) - 1) >> 2 * lane_id().t;
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
  using Step = StepWeights<kHeadDim>;
  using Queries = WarpQueries<kHeadDim>;
  static constexpr int kDims = kHeadDim, kPieces = kHeadDim / 8, kTilesAtOnce = 1;
  static constexpr bool kBySplits = true;  // the sums of a split begin with zeros

  PartSoftmax<2 * kPieces> part;

  __device__ void clear() { part.clear(); }

  // Brings the sums to the highest score of all tiles so far.
  __device__ void begin_step(const Step& step) {
    float high = part.weight.high;
#pragma unroll
    for (const float of_tile : step.high) high = fmaxf(high, of_tile);
    const float keep = weight2(part.weight.high, high);
    part.weight = {high, keep * part.weight.sum};
#pragma unroll
    for (float& v : part.sum) v *= keep;
  }

  // Adds a tile: its weights times its values.
  __device__ void add_tile(const Step& of_step, int tile, const unsigned char* values) {
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

  // at(query, dim): where a pair of dims of the result goes. Not is_live: zeros.
  template <typename At>
  __device__ void write(int queries, bool is_live, const At& at) const {
    const LaneId lane = lane_id();
    if (lane.g >= queries) return;
    const float share = share_of(part.weight);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t pair = pack_bf16(share * part.sum[2 * piece], share * part.sum[2 * piece + 1]);
      *at(lane.g, piece * 8 + 2 * lane.t) = is_live ? pair : 0;
    }
  }

  // sums_of(query): where its sums go; weight_of(query): their weight.
  template <typename SumsOf, typename WeightOf>
  __device__ void leave(int queries, const SumsOf& sums_of, const WeightOf& weight_of) const {
    const LaneId lane = lane_id();
    if (lane.g >= queries) return;
    float* sums = sums_of(lane.g);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      *reinterpret_cast<float2*>(sums + piece * 8 + 2 * lane.t) = {part.sum[2 * piece],
                                                                   part.sum[2 * piece + 1]};
    }
    if (lane.t == 0) *weight_of(lane.g) = part.weight;
  }
};

}  // namespace photon::cuda
