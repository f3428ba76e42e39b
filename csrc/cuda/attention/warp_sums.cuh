// One step of a lone warp: scores, weights and sums of four tiles, in the order of summation of
// split_attention.cuh. What the warps of a CTA hand over to each other there stays in registers
// here: a lane's scores of two instructions are what it needs as the left operand of the next one.
#pragma once
#include "cuda/attention/warp_queries.cuh"

namespace photon::cuda {

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
