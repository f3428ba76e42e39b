// Split attention of up to 16 query heads that share a KV head over a step of positions, by a warp
// group of warps that divide it twice.
//
// scores[query][token] = Q K^T: each warp has a tile of 16 tokens. It weighs them by the highest
// score of its own tile, and leaves weights and highest scores in shared memory. sums[query][dim] =
// P V: each warp has 16 dims (or more) of all tiles, whose sums it brings to a common highest
// score. So what one warp holds of the result no other of its warp group holds, and nothing is left
// to merge between them. Queries are the rows of a matrix instruction: one half of them, where
// there are 8 at most, or both. A row without a query has what lay in shared memory before, and
// spoils nothing: a row's sums depend on no other row.
#pragma once
#include <cmath>

#include "cuda/bf16.cuh"
#include "cuda/log2e.cuh"
#include "cuda/split_ring.cuh"

namespace photon::cuda {

constexpr int kHalfQueries = 8,
              kMaxSplitGroupQueries = 16;  // queries of half an instruction, and of all of it

struct LaneId {
  int g, t;
};

// As in ptx.cuh.
__device__ inline LaneId lane_id() {
  const int lane = threadIdx.x % kWarpSize;
  return {lane / 4, lane % 4};
}

// exp2(x - high), where high is -inf as long as all x were.
__device__ inline float weight2(float x, float high) {
  return exp2_approx(x - (high == -INFINITY ? 0.0f : high));
}

// What a softmax over some positions has come to, in powers of two: the highest score, and the sum
// of exp2(score - high).
struct Weight {
  float high, sum;
};

// Of one query, what a lane holds: sums of exp2(score - high) * v for some dims, and what they
// weigh.
template <int kValues>
struct PartSoftmax {
  Weight weight;
  float sum[kValues];

  __device__ void clear() {
    weight = {-INFINITY, 0.0f};
#pragma unroll
    for (float& v : sum) v = 0.0f;
  }

  // What is contracted to fmaf is written so: the bits depend on the order alone, wherever it
  // happens.
  __device__ void add(const PartSoftmax& other) {
    const float high = fmaxf(weight.high, other.weight.high);
    const float keep = weight2(weight.high, high), share = weight2(other.weight.high, high);
    const auto merged = [&](float a, float b) { return fmaf(share, b, fmaf(keep, a, 0.0f)); };
    weight = {high, merged(weight.sum, other.weight.sum)};
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = merged(sum[i], other.sum[i]);
  }
};

// Queries and weights as instructions take their left operand: [fragment of 16 columns][lane].
// Where half of the rows are used, the words of the other half are not stored; load() gives zeros.
template <int kHalves, int kColumnFragments>
struct LeftFragments {
  static constexpr int kWords = 2 * kHalves;

  uint32_t at[kColumnFragments][kWarpSize][kWords];

  // The word of a query's two elements from an even `column` of a fragment on.
  __device__ uint32_t* word(int query, int fragment, int column) {
    return &at[fragment][query % kHalfQueries * 4 + column % 8 / 2]
              [column / 8 * kHalves + query / kHalfQueries];
  }

  __device__ void load(uint32_t (&a)[4], int fragment) const {
    const uint32_t* words = at[fragment][threadIdx.x % kWarpSize];
    if constexpr (kHalves == 2) {
      const uint4 v = *reinterpret_cast<const uint4*>(words);
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(words);
      a[0] = v.x, a[1] = 0, a[2] = v.y, a[3] = 0;
    }
  }
};

// What the CTAs of a cluster send to this one, for each split of a split-KV group: the sums of some
// dims, a pair in a place, and the weights.
template <int kQueries, int kPlaces>
struct ReductionMemory {
  Barrier arrived;
  Weight weights[kFewSplits][kQueries];
  float2 sums[kFewSplits][kPlaces];
};

// What the CTA's warps leave for each other.
template <int kHeadDim, int kHalves>
struct SplitShared {
  using Shape = SplitShape<kHeadDim>;
  static constexpr int kQueries = kHalves * kHalfQueries;
  // Pairs of sums: no more than there are threads to merge them, and than there is room for.
  static constexpr int kPlacesOfBoth = kHeadDim == 64 ? 80 : kHeadDim == 256 ? 16 : 128;
  static constexpr int kReductionPlaces = kHalves == 2      ? kPlacesOfBoth
                                          : kHeadDim == 256 ? 112
                                                            : 128;

  RingMemory<kHeadDim> ring;
  alignas(16) LeftFragments<kHalves, kHeadDim / 16> queries;
  alignas(16) LeftFragments<
      kHalves, Shape::kWarpGroupWarps> weights[Shape::kWarpGroups];  // of the step's tiles
  float high[Shape::kWarps][kQueries];  // of each tile the highest scores, times log2(e)
  alignas(16) Bf16 new_k[kHeadDim];
  alignas(16) Bf16 new_v[kHeadDim];
  alignas(16) ReductionMemory<kQueries, kReductionPlaces> reduction;
  bool is_last;
};

// A warp's scores: [tokens 8 i .. + 7][queries g, tokens 2t and 2t + 1, then queries 8 + g].
using TileScores = float[2][4];

template <int kHeadDim, int kHalves>
__device__ inline void score_tile(TileScores& scores, const SplitShared<kHeadDim, kHalves>& shared,
                                  const unsigned char* tile) {
  const int lane = threadIdx.x % kWarpSize,
            first = SplitShape<kHeadDim>::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  TileScores parts[2] = {};  // two chains of instructions each: one waits for the one before
#pragma unroll
  for (int fragment = 0; fragment < kHeadDim / 16; ++fragment) {
    uint32_t query[4], key[4];
    load_matrices(key, tile + (first ^ fragment * 32));
    shared.queries.load(query, fragment);
    multiply_bf16(parts[fragment % 2][0], query, {key[0], key[1]});
    multiply_bf16(parts[fragment % 2][1], query, {key[2], key[3]});
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[i][j] = parts[0][i][j] + parts[1][i][j];
  }
}

// From scores to the tile's weights, of the tokens whose bits are set in `present`. Weights are
// rounded before they are summed, so that what the values are multiplied by adds up to one.
template <int kHeadDim, int kHalves>
__device__ inline void weigh_tile(const TileScores& scores, uint32_t present, float scale_log2,
                                  SplitShared<kHeadDim, kHalves>& shared) {
  using Shape = SplitShape<kHeadDim>;
  const LaneId lane = lane_id();
  LeftFragments<kHalves, Shape::kWarpGroupWarps>& fragments = shared.weights[Shape::warp_group()];
  present >>= 2 * lane.t;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float weights[4], high = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_there = (present >> (i / 2 * 8 + i % 2) & 1) != 0;
      weights[i] = is_there ? scores[i / 2][2 * half + i % 2] * scale_log2 : -INFINITY;
      high = fmaxf(high, weights[i]);
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2)
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, offset));
#pragma unroll
    for (float& weight : weights) weight = weight2(weight, high);
    const int query = half * kHalfQueries + lane.g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *fragments.word(query, Shape::warp_group_warp(), 8 * i + 2 * lane.t) =
          pack_bf16(weights[2 * i], weights[2 * i + 1]);
    }
    if (lane.t == 0) shared.high[Shape::warp()][query] = high;
  }
}

// What a lane holds of its warp's dims: of queries g and g + 8, dims 8 j + 2t and 8 j + 2t + 1 for
// each j.
template <int kHeadDim, int kHalves>
struct DimSoftmax {
  using Shape = SplitShape<kHeadDim>;
  static constexpr int kPieces = Shape::kWarpDims / 8;
  using Part = PartSoftmax<2 * kPieces>;

  Part parts[kHalves];

  __device__ static int first_dim() { return Shape::warp_group_warp() * Shape::kWarpDims; }
  __device__ static bool has_dims() { return first_dim() < kHeadDim; }
  // Of a pair of sums.
  __device__ static int dim(int piece) { return first_dim() + piece * 8 + lane_id().t * 2; }
  __device__ static int query(int half) { return half * kHalfQueries + lane_id().g; }

  __device__ void clear() {
#pragma unroll
    for (Part& part : parts) part.clear();
  }

  __device__ void add(const DimSoftmax& other) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) parts[half].add(other.parts[half]);
  }

  // Adds a step of the warp group: its weights in shared memory, times the values in the slot.
  __device__ void add_step(const SplitShared<kHeadDim, kHalves>& shared,
                           const unsigned char (&slot)[Shape::kWarps][Shape::kTileBytes]) {
    constexpr uint32_t kOnes = 0x3f803f80;
    const int lane = threadIdx.x % kWarpSize, token = lane % 16,
              vector = first_dim() / kPack + lane / 16;
    const auto* tiles = slot + Shape::warp_group() * Shape::kWarpGroupWarps;
    const auto* high = shared.high + Shape::warp_group() * Shape::kWarpGroupWarps;
    if (!has_dims()) return;
    raise_high(high);
#pragma unroll
    for (int tile = 0; tile < Shape::kWarpGroupWarps; ++tile) {
      uint32_t weights[4];
      shared.weights[Shape::warp_group()].load(weights, tile);
      float share[kHalves], weight[4] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        share[half] = weight2(high[tile][query(half)], parts[half].weight.high);
      multiply_bf16(weight, weights,
                    {kOnes, kOnes});  // as if there were one more dim whose values are 1
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        parts[half].weight.sum = fmaf(share[half], weight[2 * half], parts[half].weight.sum);
#pragma unroll
      for (int pair = 0; pair < kPieces / 2; ++pair) {
        uint32_t values[4];
        load_matrices_transposed(values, &tiles[tile][Shape::place(token, vector + 2 * pair)]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float product[4] = {};
          multiply_bf16(product, weights, {values[2 * i], values[2 * i + 1]});
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& sum = parts[half].sum[2 * (2 * pair + i) + j];
              sum = fmaf(share[half], product[2 * half + j], sum);
            }
          }
        }
      }
    }
  }

 private:
  // To the highest score of all of the warp group's tiles in the step and before.
  __device__ void raise_high(const float (*of_tile)[kHalves * kHalfQueries]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Part& part = parts[half];
      float high = part.weight.high;
#pragma unroll
      for (int tile = 0; tile < Shape::kWarpGroupWarps; ++tile)
        high = fmaxf(high, of_tile[tile][query(half)]);
      const float keep = weight2(part.weight.high, high);
      part.weight = {high, keep * part.weight.sum};
#pragma unroll
      for (float& v : part.sum) v *= keep;
    }
  }
};

}  // namespace photon::cuda
