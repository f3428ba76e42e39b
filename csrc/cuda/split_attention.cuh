// One warp's attention of up to 16 query heads over tiles of 16 positions, by matrix instructions.
//
// Both products are computed transposed, so that the queries are the 8 columns of an instruction and none of its rows is idle:
// scores[token][query] = K Q^T and sums[dim][query] = V^T P^T. K and V go from global memory straight into A fragments, 16 bytes a lane and
// load, because the order of the summed index, and which row stands for which dim, are free as long as both operands agree.
// With g = lane / 4, t = lane % 4, as in ptx.cuh:
//   keys    a lane loads dims 32 b + 8 t .. + 7 of tokens g and g + 8: two instructions' worth of k, whose order inside the 32 is permuted;
//   values  a lane loads dims 64 c + 8 g .. + 7 of tokens 2t, 2t + 1, 2t + 8, 2t + 9; pairs of tokens are put together by byte_perm, and
//           rows g and g + 8 of an instruction stand for neighbouring dims of those 8. Where 32 dims remain, 4 g .. + 3 of them.
#pragma once
#include <cmath>

#include "common/kv.h"
#include "cuda/bf16.cuh"
#include "cuda/element.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr int kTileTokens = 16;
constexpr int kColumnQueries = 8;         // queries of one instruction
constexpr uint32_t kAbsent = UINT32_MAX;  // no position of the past, or not in the cache
constexpr float kLog2E = 1.44269504088896f;

struct LaneId {
  int g, t;
};

__device__ inline LaneId lane_id() {
  const int lane = threadIdx.x % kWarpSize;
  return {lane / 4, lane % 4};
}

// Where the 16 positions from `first` on are, in vectors of 16 bytes from the cache's base: lanes 0 to 15 know of their keys, lanes 16 to
// 31 of their values. Absent: positions from `end` on, `new_position`, and those whose page is none.
__device__ inline uint32_t find_tile(const KvCache& cache, int32_t row, int32_t head, int32_t first, int32_t end, int32_t new_position) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t position = first + lane % kTileTokens;
  if (position >= end || position == new_position) return kAbsent;
  const KvPlace place = find_place(cache, row, position);
  if (place.page < 0) return kAbsent;
  return static_cast<uint32_t>((lane < kTileTokens ? place.k_offset(cache, head) : place.v_offset(cache, head)) / kPack);
}

// The elements from `p` on, as a lane's words. Keys and values come through here, whether they are in the cache or new.
template <typename Words>
__device__ inline Words words_at(const Bf16* p) {
  return *reinterpret_cast<const Words*>(p);
}

// A lane's fragments of a tile's keys and values.
template <int kHeadDim>
struct KvTile {
  static constexpr int kBlocks = kHeadDim / 32;  // of keys
  static constexpr int kChunks = kHeadDim / 64;  // of values
  static constexpr int kParts = kHeadDim / 32;   // halves of the chunks, and the 32 dims that may remain
  static constexpr bool kHasTail = kHeadDim % 64 != 0;

  uint4 k[2][kBlocks];  // [token]
  uint2 v[kParts][4];   // [part][token]
  bool present[2];      // of the keys' tokens: the others' scores mean nothing

  __device__ static int key_token(int i, LaneId lane) { return lane.g + 8 * i; }
  __device__ static int value_token(int i, LaneId lane) { return 2 * lane.t + i % 2 + i / 2 * 8; }

  // One lane's share of the key (or value) at `p`, its token number i; nothing is there if not `present`.
  __device__ void set_keys(int i, const Bf16* p, bool is_present, LaneId lane) {
    present[i] = is_present;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) k[i][b] = is_present ? words_at<uint4>(p + b * 32 + lane.t * 8) : uint4{};
  }

  __device__ void set_values(int i, const Bf16* p, bool is_present, LaneId lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 words = is_present ? words_at<uint4>(p + c * 64 + lane.g * 8) : uint4{};
      v[2 * c][i] = {words.x, words.y};
      v[2 * c + 1][i] = {words.z, words.w};
    }
    if constexpr (kHasTail) v[kParts - 1][i] = is_present ? words_at<uint2>(p + kChunks * 64 + lane.g * 4) : uint2{};
  }

  __device__ void load_keys(const KvCache& cache, uint32_t places, LaneId lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t place = __shfl_sync(kFullWarp, places, key_token(i, lane));
      set_keys(i, static_cast<const Bf16*>(cache.k) + static_cast<size_t>(place) * kPack, place != kAbsent, lane);
    }
  }

  __device__ void load_values(const KvCache& cache, uint32_t places, LaneId lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t place = __shfl_sync(kFullWarp, places, kTileTokens + value_token(i, lane));
      set_values(i, static_cast<const Bf16*>(cache.v) + static_cast<size_t>(place) * kPack, place != kAbsent, lane);
    }
  }

  // Puts the key (or value) of the tile's token `token` in its place; the other lanes have none of it.
  __device__ void patch_keys(int token, const Bf16* key, LaneId lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (key_token(i, lane) == token) set_keys(i, key, true, lane);
    }
  }

  __device__ void patch_values(int token, const Bf16* value, LaneId lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (value_token(i, lane) == token) set_values(i, value, true, lane);
    }
  }
};

// exp2(x - high), where high is -inf as long as all x were.
__device__ inline float weight2(float x, float high) { return exp2f(x - (high == -INFINITY ? 0.0f : high)); }

// An 8 x 8 matrix of bf16, lane (g, t) holding elements (g, 2t) and (g, 2t + 1), becomes (2t, g) and (2t + 1, g).
__device__ inline uint32_t transpose(uint32_t pair, LaneId lane) {
  const int source = lane.t * 8 + lane.g / 2;
  const uint32_t first = __shfl_sync(kFullWarp, pair, source), second = __shfl_sync(kFullWarp, pair, source + 4);
  return __byte_perm(first, second, lane.g % 2 == 0 ? 0x5410 : 0x7632);
}

// Over the eight lanes that have the same t.
template <typename Combine>
__device__ inline float over_rows(float v, const Combine& combine) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) v = combine(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

// What a lane holds of its warp's online softmax, in powers of two: queries 8 c + 2t and 8 c + 2t + 1 of each column c.
template <int kHeadDim, int kColumns>
struct WarpSoftmax {
  using Tile = KvTile<kHeadDim>;

  float high[kColumns][2];                  // the highest score, times log2(e)
  float weight[kColumns][2];                // this lane's share of the sum of exp2(score - high)
  float sum[kColumns][Tile::kParts][2][4];  // of exp2(score - high) * v: the part's dims 0, 1 and then 2, 3, as fragments of an instruction
  uint32_t p[kColumns][2];                  // the tile's weights, as fragments

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        high[c][i] = -INFINITY;
        weight[c][i] = 0.0f;
#pragma unroll
        for (int part = 0; part < Tile::kParts; ++part) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[c][part][i][j] = 0.0f;
        }
      }
    }
  }

  // The tile's scores for the queries in shared memory, [query][stride].
  template <int kStride>
  __device__ static void score(float (&scores)[kColumns][4], const Tile& tile, const Bf16 (*q)[kStride], LaneId lane) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[c][j] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
      const uint4 k0 = tile.k[0][b], k1 = tile.k[1][b];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 query = words_at<uint4>(&q[c * kColumnQueries + lane.g][b * 32 + lane.t * 8]);
        multiply_bf16(scores[c], {k0.x, k1.x, k0.y, k1.y}, {query.x, query.y});
        multiply_bf16(scores[c], {k0.z, k1.z, k0.w, k1.w}, {query.z, query.w});
      }
    }
  }

  // From scores to weights: `present` says which of the lane's two tokens there are. Weights are rounded before they are summed, so that
  // what the values are multiplied by adds up to one.
  __device__ void weigh(const float (&scores)[kColumns][4], const bool (&present)[2], float scale_log2, LaneId lane) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float weights[4], keep[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float first = present[0] ? scores[c][i] * scale_log2 : -INFINITY;
        const float second = present[1] ? scores[c][2 + i] * scale_log2 : -INFINITY;
        const float before = high[c][i];
        high[c][i] = fmaxf(before, over_rows(fmaxf(first, second), [](float a, float b) { return fmaxf(a, b); }));
        keep[i] = weight2(before, high[c][i]);
        weights[i] = weight2(first, high[c][i]);
        weights[2 + i] = weight2(second, high[c][i]);
      }
      const uint32_t first = pack_bf16(weights[0], weights[1]), second = pack_bf16(weights[2], weights[3]);
      weight[c][0] = fmaf(weight[c][0], keep[0], low_bf16(first) + low_bf16(second));
      weight[c][1] = fmaf(weight[c][1], keep[1], high_bf16(first) + high_bf16(second));
      p[c][0] = transpose(first, lane);
      p[c][1] = transpose(second, lane);
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[c][part][i][j] *= keep[j % 2];
        }
      }
    }
  }

  // Adds the tile's weighted values.
  __device__ void add(const Tile& tile) {
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      const uint2(&v)[4] = tile.v[part];
      const uint32_t words[2][4] = {{v[0].x, v[1].x, v[2].x, v[3].x}, {v[0].y, v[1].y, v[2].y, v[3].y}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t (&word)[4] = words[i];
        const uint32_t a[4] = {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                               __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)};
#pragma unroll
        for (int c = 0; c < kColumns; ++c) multiply_bf16(sum[c][part][i], a, p[c]);
      }
    }
  }

  // Writes the warp's sums, [query][stride], and its highs and weights, [query].
  template <int kStride>
  __device__ void store(float (*sums)[kStride], float* highs, float* weights, LaneId lane) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = c * kColumnQueries + 2 * lane.t + i;
#pragma unroll
        for (int part = 0; part < Tile::kParts; ++part) {
          const float (&s)[2][4] = sum[c][part];
          const int dim = part / 2 * 64 + (part < 2 * Tile::kChunks ? lane.g * 8 + part % 2 * 4 : lane.g * 4);
          *reinterpret_cast<float4*>(&sums[query][dim]) = {s[0][i], s[0][2 + i], s[1][i], s[1][2 + i]};
        }
        const float total = over_rows(weight[c][i], [](float a, float b) { return a + b; });
        if (lane.g != 0) continue;
        highs[query] = high[c][i];
        weights[query] = total;
      }
    }
  }
};

}  // namespace photon::cuda
