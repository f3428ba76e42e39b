// One step of split attention: up to 16 query heads that share a KV head attend to the positions of
// the step. The four warps of a warp group divide the work in two different ways.
//
// scores[query][token] = Q K^T: each warp has a tile of 16 tokens. It computes their weights
// relative to the highest score of its own tile, and leaves the weights and that score in shared
// memory. sums[query][dim] = P V: each warp has 16 dims (or more) of all tiles, and brings their
// sums to a common highest score. So no two warps of a warp group hold the same sum, and nothing is
// left to reduce between them.
//
// Queries are the rows of a matrix instruction. Up to 8 queries take one half of its rows, more
// take both. A row without a query computes with whatever is in shared memory; that does no harm,
// because a row's sums depend on no other row.
#pragma once
#include <cmath>

#include "cuda/attention/split_ring.cuh"
#include "cuda/bf16.cuh"
#include "cuda/log2e.cuh"

namespace photon::cuda {

constexpr int kHalfQueries = 8,
              kMaxSplitGroupQueries = 16;  // queries in half the rows of an instruction, and in all

struct LaneId {
  int g, t;
};

// As in ptx.cuh.
__device__ inline LaneId lane_id() {
  const int lane = threadIdx.x % kWarpSize;
  return {lane / 4, lane % 4};
}

// exp2(x - high). As long as all scores were -inf, high is -inf, too, and the weight is 0.
__device__ inline float weight2(float x, float high) {
  return exp2_approx(x - (high == -INFINITY ? 0.0f : high));
}

// The state of a softmax over some positions, in powers of two: the highest score, and the sum of
// exp2(score - high).
struct Weight {
  float high, sum;
};

// What sums of so much weight are multiplied by.
__device__ inline float share_of(const Weight& weight) {
  return weight.sum == 0.0f ? 0.0f : 1.0f / weight.sum;
}

// What a lane holds of one query: sums of exp2(score - high) * v for some dims, and their weight.
template <int kValues>
struct PartSoftmax {
  Weight weight;
  float sum[kValues];

  __device__ void clear() {
    weight = {-INFINITY, 0.0f};
#pragma unroll
    for (float& v : sum) v = 0.0f;
  }

  // Every fused multiply-add is written as fmaf, so that the bits of a sum depend on its order
  // alone, and not on what the compiler contracts at one place and not at another.
  __device__ void add(const PartSoftmax& other) {
    const float high = fmaxf(weight.high, other.weight.high);
    const float keep = weight2(weight.high, high), share = weight2(other.weight.high, high);
    const auto merged = [&](float a, float b) { return fmaf(share, b, fmaf(keep, a, 0.0f)); };
    weight = {high, merged(weight.sum, other.weight.sum)};
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = merged(sum[i], other.sum[i]);
  }
};

// Queries or weights, in the order in which a matrix instruction takes its left operand: [fragment
// of 16 columns][lane]. Where half of the rows are used, the words of the other half are not
// stored, and load() gives zeros for them.
template <int kHalves, int kColumnFragments>
struct LeftFragments {
  static constexpr int kWords = 2 * kHalves;

  uint32_t at[kColumnFragments][kWarpSize][kWords];

  // The word that holds two elements of a query: columns `column`, which is even, and `column` + 1
  // of a fragment.
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

// What a split leaves for the merge: for each query head the sums of exp2(score - high) * v, and
// their weight.
struct Partials {
  float* sums;        // [tokens * q_heads, splits, head_dim]
  Weight* weights;    // [tokens * q_heads, splits]
  unsigned* arrived;  // [split-KV groups]; zero between calls
};

// Writes zeros for the tokens that attend to nothing, which have no tile range.
template <int kHeadDim>
__device__ void clear_dead_tokens(const SplitGrid& grid) {
  constexpr int kVectors = kHeadDim / kPack;
#pragma unroll 1
  for (int token = blockIdx.x; token < grid.tokens; token += gridDim.x) {
    if (grid.kv_len(token) > 0) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < grid.q_heads * kVectors; i += blockDim.x) {
      reinterpret_cast<uint4*>(grid.out.at(token, i / kVectors))[i % kVectors] = {0, 0, 0, 0};
    }
  }
}

// Where a CTA receives what the CTAs of its cluster send to it, for each split of a split-KV group:
// the sums of some dims, of which a place holds a pair, and the weights. Where no cluster has a
// split-KV group, the tokens' order has the place of the sums.
template <int kQueries, int kPlaces>
struct ReductionMemory {
  static_assert(sizeof(TokenOrder) <= kFewSplits * kPlaces * sizeof(float2));

  Barrier arrived;
  Weight weights[kFewSplits][kQueries];
  union {
    float2 sums[kFewSplits][kPlaces];
    TokenOrder order;
  };
};

// The CTA's shared memory: what its warps leave for each other.
template <int kHeadDim, int kHalves>
struct SplitShared {
  using Shape = SplitShape<kHeadDim>;
  static constexpr int kQueries = kHalves * kHalfQueries;
  // Pairs of sums. Threads merge a pair each, and shared memory has no room for more.
  static constexpr int kPlacesOfBoth = kHeadDim == 64 ? 80 : kHeadDim == 256 ? 16 : 128;
  static constexpr int kReductionPlaces = kHalves == 2      ? kPlacesOfBoth
                                          : kHeadDim == 256 ? 112
                                                            : 128;

  RingMemory<kHeadDim> ring;
  alignas(16) LeftFragments<kHalves, kHeadDim / 16> queries;
  alignas(16) LeftFragments<
      kHalves, Shape::kWarpGroupWarps> weights[Shape::kWarpGroups];  // of the step's tiles
  float high[Shape::kWarps][kQueries];  // the highest score of each tile, times log2(e)
  alignas(16) Bf16 new_k[kHeadDim];
  alignas(16) Bf16 new_v[kHeadDim];
  alignas(16) ReductionMemory<kQueries, kReductionPlaces> reduction;
  CtaSplits cta_splits[Shape::kWarps];  // the same in all, where registers are few
  bool is_last;
};

// A lane's scores of its warp's tile, [i][j]: query g for j < 2, else query g + 8; token 8 i + 2t +
// j % 2.
using TileScores = float[2][4];

template <int kHeadDim, int kHalves>
__device__ inline void score_tile(TileScores& scores, const SplitShared<kHeadDim, kHalves>& shared,
                                  const unsigned char* tile) {
  const int lane = threadIdx.x % kWarpSize,
            first = SplitShape<kHeadDim>::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  TileScores parts[2] = {};  // two chains of instructions by turns, because an instruction waits
                             // for the one before in its chain
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

// Computes the tile's weights from its scores. Tokens whose bits in `present` are not set get the
// weight 0. Weights are rounded before they are summed, so that those that the values are
// multiplied with add up to one.
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

// What a lane holds of the sums of its warp's dims: for queries g and g + 8, dims 8 j + 2t and 8 j
// + 2t + 1 for each j.
template <int kHeadDim, int kHalves>
struct DimSoftmax {
  using Shape = SplitShape<kHeadDim>;
  static constexpr int kPieces = Shape::kWarpDims / 8;
  using Part = PartSoftmax<2 * kPieces>;

  Part parts[kHalves];

  __device__ static int first_dim() { return Shape::warp_group_warp() * Shape::kWarpDims; }
  __device__ static bool has_dims() { return first_dim() < kHeadDim; }
  // The first of the two dims of a piece, which is a pair of sums.
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

  // Adds a step of the warp group: the weights in shared memory times the values in the slot.
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
                    {kOnes, kOnes});  // the sum of weights is that of a dim whose values are 1
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
  // Brings the sums to the highest score of all tiles so far, those of this step included.
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
