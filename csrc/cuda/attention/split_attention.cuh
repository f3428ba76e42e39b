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

// What is there in fp8 besides; of bfloat16 nothing.
template <typename Shape, int kHalves, bool = Shape::Kv::kIsScaled>
struct SharedScales {};

template <typename Shape, int kHalves>
struct SharedScales<Shape, kHalves, true> {
  static constexpr int kQueries = kHalves * kHalfQueries;

  float query_scales[kQueries];         // which queries were divided by
  float sums[Shape::kWarps][kQueries];  // of each tile's weights
  float value_scales[Shape::kWarps];    // which the scales of a tile's values were divided by
  float new_k_scale, new_v_scale;
};

// The CTA's shared memory: what its warps leave for each other.
template <typename Shape, int kHalves>
struct SplitShared : SharedScales<Shape, kHalves> {
  using Element = typename Shape::Kv::Element;
  static constexpr int kQueries = kHalves * kHalfQueries;
  // Pairs of sums. Threads merge a pair each, and shared memory has no room for more.
  static constexpr int kPlacesOfBoth = Shape::kHeadDim == 64    ? 80
                                       : Shape::kHeadDim == 256 ? 16
                                                                : 128;
  static constexpr int kReductionPlaces = kHalves == 2             ? kPlacesOfBoth
                                          : Shape::kHeadDim == 256 ? 112
                                                                   : 128;

  RingMemory<Shape> ring;
  alignas(16) LeftFragments<kHalves, Shape::kHeadDim / 16> queries;
  alignas(16) LeftFragments<kHalves, Shape::kWarpGroupWarps * Shape::kTileFragments> weights
      [Shape::kWarpGroups];             // of the step's tiles
  float high[Shape::kWarps][kQueries];  // the highest score of each tile, times log2(e)
  alignas(16) Element new_k[Shape::kHeadDim];
  alignas(16) Element new_v[Shape::kHeadDim];
  alignas(16) ReductionMemory<kQueries, kReductionPlaces> reduction;
  CtaSplits cta_splits[Shape::kWarps];  // the same in all, where registers are few
  bool is_last;
};

constexpr int kLaneTokens = 4;  // of a tile, for each of a lane's queries

// What scores and weights of a tile are multiplied by besides; token i of a lane as Kv has it.
template <typename Shape, int kHalves, bool = Shape::Kv::kIsScaled>
struct TileFactors {
  using Shared = SplitShared<Shape, kHalves>;
  using Weights = float[kLaneTokens];

  float scale_log2;

  __device__ TileFactors(float scale_log2, Shared&, int) : scale_log2(scale_log2) {}

  __device__ float query_factor(int) const { return scale_log2; }
  __device__ float score(float score, float query_factor, int) const {
    return score * query_factor;
  }
  __device__ static void sum_up(const Weights&, int) {}
  __device__ static float of_value(float weight, int) { return weight; }
};

template <typename Shape, int kHalves>
struct TileFactors<Shape, kHalves, true> {
  using Kv = typename Shape::Kv;
  using Shared = SplitShared<Shape, kHalves>;
  using Weights = float[kLaneTokens];

  float scale_log2;
  Shared& shared;
  Weights keys, values;

  // `slot`: of the keys.
  __device__ TileFactors(float scale_log2, Shared& shared, int slot)
      : scale_log2(scale_log2), shared(shared) {
    const auto& scales = shared.ring.scales[slot][Shape::warp()];
    const uint32_t own = magnitude_bits(scales.values[threadIdx.x % kWarpSize]);
    const auto most = BinaryScale::of(__reduce_max_sync(kFullWarp, own));
    if (threadIdx.x % kWarpSize == 0) shared.value_scales[Shape::warp()] = most.scale;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      keys[i] = scales.keys[Kv::first_token() + Kv::token(i)];
      values[i] = scales.values[Kv::first_token() + Kv::token(i)] * most.inverse;
    }
  }

  __device__ float query_factor(int query) const { return scale_log2 * shared.query_scales[query]; }
  __device__ float score(float score, float query_factor, int i) const {
    return score * keys[i] * query_factor;
  }

  // By all lanes of a query.
  __device__ void sum_up(const Weights& weights, int query) const {
    float sum = 0.0f;
#pragma unroll
    for (const float weight : weights) sum += weight;
#pragma unroll
    for (int i = 1; i < Kv::kPeers; i *= 2)
      sum += __shfl_xor_sync(kFullWarp, sum, i * Kv::kFirstPeer);
    if (Kv::peer(lane_id()) == 0) shared.sums[Shape::warp()][query] = sum;
  }

  __device__ float of_value(float weight, int i) const { return weight * values[i]; }
};

// Computes the tile's weights from its scores. Tokens whose bits in `present` are not set get the
// weight 0. Weights are rounded before they are summed, so that those that the values are
// multiplied with add up to one; but in fp8, where they get the values' scales first, before that.
template <typename Shape, int kHalves>
__device__ inline void weigh_tile(const typename Shape::Kv::template Scores<kHalves>& scores,
                                  uint32_t present, const TileFactors<Shape, kHalves>& factors,
                                  SplitShared<Shape, kHalves>& shared) {
  using Kv = typename Shape::Kv;
  auto& fragments = shared.weights[Shape::warp_group()];
  present >>= Kv::first_token();
#pragma unroll
  for (int part = 0; part < Kv::template kParts<kHalves>; ++part) {
    const int query = Kv::query(part);
    const float query_factor = factors.query_factor(query);
    float weights[kLaneTokens], high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const bool is_there = (present >> Kv::token(i) & 1) != 0;
      weights[i] = is_there ? factors.score(scores.of(part, i), query_factor, i) : -INFINITY;
      high = fmaxf(high, weights[i]);
    }
#pragma unroll
    for (int i = 1; i < Kv::kPeers; i *= 2)
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, i * Kv::kFirstPeer));
#pragma unroll
    for (float& weight : weights) weight = weight2(weight, high);
    factors.sum_up(weights, query);
#pragma unroll
    for (int pair = 0; pair < kLaneTokens / 2; ++pair) {
      *fragments.word(query, Shape::warp_group_warp() * Shape::kTileFragments + Kv::fragment(pair),
                      Kv::column(pair)) =
          Kv::pack(factors.of_value(weights[2 * pair], 2 * pair),
                   factors.of_value(weights[2 * pair + 1], 2 * pair + 1));
    }
    if (Kv::peer(lane_id()) == 0) shared.high[Shape::warp()][query] = high;
  }
}

// What a lane holds of the sums of its warp's dims, for each of its queries: pairs of dims that
// follow one another.
template <typename Shape, int kHalves>
struct DimSoftmax {
  using Kv = typename Shape::Kv;
  static constexpr int kParts = Kv::template kParts<kHalves>,
                       kPieces = Shape::kWarpDims / Kv::kPieceDims,
                       kTileDims = Shape::kWarpDims / 16;  // of matrix instructions
  using Part = PartSoftmax<2 * kPieces>;

  Part parts[kParts];

  __device__ static int first_dim() { return Shape::warp_group_warp() * Shape::kWarpDims; }
  __device__ static bool has_dims() { return first_dim() < Shape::kHeadDim; }
  // The first of the two dims of a piece, which is a pair of sums.
  __device__ static int dim(int piece) {
    return first_dim() + piece * Kv::kPieceDims + Kv::peer(lane_id()) * 2;
  }
  __device__ static int query(int part) { return Kv::query(part); }

  __device__ void clear() {
#pragma unroll
    for (Part& part : parts) part.clear();
  }

  __device__ void add(const DimSoftmax& other) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) parts[part].add(other.parts[part]);
  }

  // Adds a step of the warp group: the weights in shared memory times the values in the slot.
  __device__ void add_step(const SplitShared<Shape, kHalves>& shared,
                           const unsigned char (&slot)[Shape::kWarps][Shape::kTileBytes]) {
    const auto* tiles = slot + Shape::warp_group() * Shape::kWarpGroupWarps;
    const auto* high = shared.high + Shape::warp_group() * Shape::kWarpGroupWarps;
    if (!has_dims()) return;
    raise_high(high);
#pragma unroll
    for (int tile = 0; tile < Shape::kWarpGroupWarps; ++tile) {
      uint32_t weights[Shape::kTileFragments][4];
#pragma unroll
      for (int i = 0; i < Shape::kTileFragments; ++i)
        shared.weights[Shape::warp_group()].load(weights[i], tile * Shape::kTileFragments + i);
      float share[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        share[part] = weight2(high[tile][query(part)], parts[part].weight.high);
      add_weights(shared, tile, weights, share);
#pragma unroll
      for (int dims = 0; dims < kTileDims; ++dims) {
        const auto add = [&](int part, int i, float product) {
          float& sum = parts[part].sum[2 * kPieces / kTileDims * dims + i];
          sum = fmaf(share[part], product, sum);
        };
        Kv::template multiply<Shape, kHalves>(weights, tiles[tile], first_dim() / 16 + dims, add);
      }
    }
  }

 private:
  // Adds a tile's weights, in fp8 as they were summed up; and turns shares of weights into those of
  // products.
  __device__ void add_weights(const SplitShared<Shape, kHalves>& shared, int tile,
                              const uint32_t (&weights)[Shape::kTileFragments][4],
                              float (&share)[kParts]) {
    if constexpr (Kv::kIsScaled) {
      const int warp = Shape::warp_group() * Shape::kWarpGroupWarps + tile;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float& sum = parts[part].weight.sum;
        sum = fmaf(share[part], shared.sums[warp][query(part)], sum);
        share[part] *= shared.value_scales[warp];
      }
    } else {
      constexpr uint32_t kOnes = 0x3f803f80;
      float weight[4] = {};
      multiply_bf16(weight, weights[0],
                    {kOnes, kOnes});  // the sum of weights is that of a dim whose values are 1
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        parts[half].weight.sum = fmaf(share[half], weight[2 * half], parts[half].weight.sum);
    }
  }

  // Brings the sums to the highest score of all tiles so far, those of this step included.
  __device__ void raise_high(const float (*of_tile)[kHalves * kHalfQueries]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      Part& part = parts[i];
      float high = part.weight.high;
#pragma unroll
      for (int tile = 0; tile < Shape::kWarpGroupWarps; ++tile)
        high = fmaxf(high, of_tile[tile][query(i)]);
      const float keep = weight2(part.weight.high, high);
      part.weight = {high, keep * part.weight.sum};
#pragma unroll
      for (float& v : part.sum) v *= keep;
    }
  }
};

}  // namespace photon::cuda
