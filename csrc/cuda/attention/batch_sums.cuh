// One step of a one-warp CTA in an order of summation of its own, for calls whose bits may depend
// on the batch. It takes half the instructions of warp_sums.cuh: positions, and then dims, are the
// 16 rows of a matrix instruction and query heads its 8 columns; all tiles of a step share one
// highest score; values are added to the sums by the instruction itself; and the sums of a group
// that a warp has as a whole run on across its splits.
#pragma once
#include "cuda/attention/batch_queries.cuh"

namespace photon::cuda {

// What a lane holds of a step: scores, times log2(e), for queries 2t and 2t + 1 each, of positions
// g and g + 8 of each tile; then weights, rounded, of query g for positions 2t, 2t + 1, 2t + 8 and
// 2t + 9.
template <int kHeadDim>
struct BatchStep {
  using Shape = WarpShape<kHeadDim>;

  float scores[Shape::kTiles][4];
  uint32_t weights[Shape::kTiles][2];

  __device__ void leave_out(int tile) {
#pragma unroll
    for (float& score : scores[tile]) score = -INFINITY;
  }

  // Scores kTiles tiles from `first` on, whose keys follow each other; of their positions `tokens`
  // are in the context.
  template <int kTiles>
  __device__ void score(int first, const BatchQueries<kHeadDim>& queries, const unsigned char* keys,
                        int32_t tokens, float scale_log2) {
    const int lane = threadIdx.x % kWarpSize, place = Shape::place(lane % 16, lane / 16);
    float parts[kTiles][2][4] = {};  // chains of instructions that do not wait for each other
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t key[4];
        load_matrices(key, keys + tile * Shape::kTileBytes + Shape::fragment_slice(fragment) +
                               (place ^ Shape::fragment_vectors(fragment)));
        multiply_bf16(parts[tile][fragment % 2], key, queries.at[fragment]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[first + tile][i] = (parts[tile][0][i] + parts[tile][1][i]) * scale_log2;
    }
    if (tokens < kTiles * kTileTokens) leave_out_from<kTiles>(first, tokens);
  }

 private:
  template <int kTiles>
  __device__ void leave_out_from(int first, int32_t tokens) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_there = tile * kTileTokens + i / 2 * 8 + lane_id().g < tokens;
        scores[first + tile][i] = is_there ? scores[first + tile][i] : -INFINITY;
      }
    }
  }
};

// What a lane holds of the sums of a tile range: for queries 2t and 2t + 1 by turns, dims g and g +
// 8 of each fragment of 16; and the weight of both.
template <int kHeadDim>
class BatchSums {
 public:
  using Shape = WarpShape<kHeadDim>;
  using Step = BatchStep<kHeadDim>;
  using Queries = BatchQueries<kHeadDim>;
  static constexpr int kDims = kHeadDim, kTilesAtOnce = 2;
  static constexpr bool kBySplits = false;

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) high_[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) weight_[i] = 0.0f;
#pragma unroll
    for (auto& fragment : sums_) {
#pragma unroll
      for (float& sum : fragment) sum = 0.0f;
    }
  }

  // Brings the sums to the highest score of all steps so far, and makes the step's weights of its
  // scores. They are rounded before they are summed, so that those that the values are multiplied
  // with add up to one.
  __device__ void begin_step(Step& step) {
    float zero[2];
    raise_high(step, zero);
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = pack_bf16(exp2_approx(step.scores[tile][2 * i] - zero[0]),
                                        exp2_approx(step.scores[tile][2 * i + 1] - zero[1]));
        step.weights[tile][i] = transpose_matrix(pair);
      }
    }
  }

  // Adds a tile: its weights times its values.
  __device__ void add_tile(const Step& step, int tile, const unsigned char* values) {
    constexpr uint32_t kOnes[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    const int lane = threadIdx.x % kWarpSize,
              first = Shape::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
      uint32_t value[4];
      load_matrices_transposed(value, values + Shape::fragment_slice(fragment) +
                                          (first ^ Shape::fragment_vectors(fragment)));
      multiply_bf16(sums_[fragment], value, step.weights[tile]);
    }
    multiply_bf16(weight_, kOnes, step.weights[tile]);
  }

  // at(query, dim): where a pair of dims of the result goes. Not is_live: zeros.
  template <typename At>
  __device__ void write(int queries, bool is_live, const At& at) const {
    const LaneId lane = lane_id();
    float share[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) share[i] = share_of({high_[i], weight_[i]});
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* pair = sums_[fragment] + 2 * i;
        const uint32_t dims = transpose_matrix(pack_bf16(share[0] * pair[0], share[1] * pair[1]));
        if (lane.g < queries) *at(lane.g, fragment * 16 + i * 8 + 2 * lane.t) = is_live ? dims : 0;
      }
    }
  }

  // sums_of(query): where its sums go; weight_of(query): their weight.
  template <typename SumsOf, typename WeightOf>
  __device__ void leave(int queries, const SumsOf& sums_of, const WeightOf& weight_of) const {
    const LaneId lane = lane_id();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = 2 * lane.t + i;
      if (query >= queries) continue;
      float* sums = sums_of(query);
#pragma unroll
      for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
        sums[fragment * 16 + lane.g] = sums_[fragment][i];
        sums[fragment * 16 + 8 + lane.g] = sums_[fragment][2 + i];
      }
      if (lane.g == 0) *weight_of(query) = {high_[i], weight_[i]};
    }
  }

 private:
  // zero: what the step's scores are relative to. As long as all scores were -inf it is 0.
  __device__ void raise_high(const Step& step, float (&zero)[2]) {
    bool is_higher = false;
    float keep[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float high = high_[i];
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile)
        high = fmaxf(high, fmaxf(step.scores[tile][i], step.scores[tile][2 + i]));
#pragma unroll
      for (int offset = 4; offset < kWarpSize; offset *= 2)
        high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, offset));
      keep[i] = weight2(high_[i], high);
      is_higher = is_higher || high > high_[i];
      high_[i] = high;
      zero[i] = high == -INFINITY ? 0.0f : high;
    }
    if (!__any_sync(kFullWarp, is_higher)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) weight_[i] *= keep[i % 2];
#pragma unroll
    for (auto& fragment : sums_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] *= keep[i % 2];
    }
  }

  float high_[2], weight_[4];  // of the weight the other half is the same
  float sums_[Shape::kFragments][4];
};

}  // namespace photon::cuda
