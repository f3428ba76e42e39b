// One warp's attention of up to 16 query heads over steps of 16 or 32 positions, by matrix instructions.
//
// scores[query][token] = Q K^T and sums[dim][query] = V^T P^T: the second one transposed, so that the queries are the 8 columns of an
// instruction and none of its rows is idle, and because then the first one's results are the second one's operand as they are. K and V go
// from global memory straight into fragments, 16 bytes a lane and load, because the order of the summed index, and which row stands for
// which dim, are free as long as both operands agree. With g = lane / 4, t = lane % 4, as in ptx.cuh, of each tile of 16 positions:
//   keys    a lane loads dims 32 b + 8 t .. + 7 of tokens g and g + 8: two instructions' worth of k, whose order inside the 32 is permuted;
//   values  a lane loads dims 64 c + 8 g .. + 7 of tokens 2t, 2t + 1, 2t + 8, 2t + 9; pairs of tokens are put together by byte_perm, and
//           rows g and g + 8 of an instruction stand for neighbouring dims of those 8. Where 32 dims remain, 4 g .. + 3 of them.
#pragma once
#include <cmath>

#include "cuda/bf16.cuh"
#include "cuda/element.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/split_cache.cuh"

namespace photon::cuda {

constexpr int kTileTokens = 16;
constexpr int kColumnQueries = 8;  // queries of one instruction
constexpr float kLog2E = 1.44269504088896f;

struct LaneId {
  int g, t;
};

__device__ inline LaneId lane_id() {
  const int lane = threadIdx.x % kWarpSize;
  return {lane / 4, lane % 4};
}

// Stands in for keys and values that are not there: a weight of zero times whatever memory holds need not be zero.
static __device__ const uint4 kNothing[32] = {};

// The elements from `p` on, as a lane's words. Keys and values come through here, whether they are in the cache or new.
template <typename Words>
__device__ inline Words words_at(const Bf16* p) {
  return *reinterpret_cast<const Words*>(p);
}

// A lane's fragments of the keys and values of a step.
template <int kHeadDim, int kTiles>
struct KvStep {
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kBlocks = kHeadDim / 32;  // of keys
  static constexpr int kChunks = kHeadDim / 64;  // of values
  static constexpr int kParts = kHeadDim / 32;   // halves of the chunks, and the 32 dims that may remain
  static constexpr bool kHasTail = kHeadDim % 64 != 0;
  static constexpr int kKeys = 2 * kTiles, kValues = 4 * kTiles;  // of a lane

  uint4 k[kKeys][kBlocks];
  uint2 v[kParts][kValues];

  __device__ static int key_token(int i, LaneId lane) { return lane.g + 8 * i; }
  __device__ static int value_token(int i, LaneId lane) { return 2 * lane.t + i % 2 + i / 2 * 8; }

  // A lane's share of the key (or value) that begins at `p`.
  __device__ static const Bf16* key_share(const Bf16* p, LaneId lane) { return p + lane.t * 8; }
  __device__ static const Bf16* value_share(const Bf16* p, LaneId lane) { return p + lane.g * 8; }

  __device__ void set_keys(int i, const Bf16* share) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) k[i][b] = words_at<uint4>(share + b * 32);
  }

  __device__ void set_values(int i, const Bf16* share, LaneId lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 words = words_at<uint4>(share + c * 64);
      v[2 * c][i] = {words.x, words.y};
      v[2 * c + 1][i] = {words.z, words.w};
    }
    if constexpr (kHasTail) v[kParts - 1][i] = words_at<uint2>(share + kChunks * 64 - lane.g * 4);
  }

  // `place` of the base, in vectors.
  __device__ static const Bf16* vector_at(const Bf16* base, uint32_t place) {
    const Bf16* there = base + static_cast<size_t>(place) * kPack;
    return place != kAbsent ? there : reinterpret_cast<const Bf16*>(kNothing);
  }

  // Lane i knows the places of token i % kTokens.
  __device__ void load_keys(const Bf16* base, uint32_t places, LaneId lane) {
    base = key_share(base, lane);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) set_keys(i, vector_at(base, __shfl_sync(kFullWarp, places, key_token(i, lane))));
  }

  __device__ void load_values(const Bf16* base, uint32_t places, LaneId lane) {
    base = value_share(base, lane);
#pragma unroll
    for (int i = 0; i < kValues; ++i) set_values(i, vector_at(base, __shfl_sync(kFullWarp, places, value_token(i, lane))), lane);
  }

  // Puts the key (or value) of the step's token `token` in its place; the other lanes have none of it.
  __device__ void patch_keys(int token, const Bf16* key, LaneId lane) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (key_token(i, lane) == token) set_keys(i, key_share(key, lane));
    }
  }

  __device__ void patch_values(int token, const Bf16* value, LaneId lane) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (value_token(i, lane) == token) set_values(i, value_share(value, lane), lane);
    }
  }
};

// exp2(x - high), where high is -inf as long as all x were.
__device__ inline float weight2(float x, float high) { return exp2_approx(x - (high == -INFINITY ? 0.0f : high)); }

// What a softmax over some positions has come to, in powers of two: the highest score, and the sum of exp2(score - high).
struct Weight {
  float high, sum;
};

// Four neighbouring values of a head, which are sums of exp2(score - high) * v, and what they weigh.
struct QuadSoftmax {
  float4 sum;
  Weight weight;

  // What is contracted to fmaf is written so: the bits depend on the order alone, wherever it happens.
  __device__ void add(const QuadSoftmax& other) {
    const float high = fmaxf(weight.high, other.weight.high);
    const float keep = weight2(weight.high, high), share = weight2(other.weight.high, high);
    const auto merged = [&](float a, float b) { return fmaf(share, b, fmaf(keep, a, 0.0f)); };
    weight = {high, merged(weight.sum, other.weight.sum)};
    sum = {merged(sum.x, other.sum.x), merged(sum.y, other.sum.y), merged(sum.z, other.sum.z), merged(sum.w, other.sum.w)};
  }
};

// Over the four lanes that have the same g.
template <typename Combine>
__device__ inline float over_row(float v, const Combine& combine) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) v = combine(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

// Queries as the warps read them, in fragments: [block of 16 dims][lane], the 8 queries of the first column in x and z, of the second in y
// and w. One column leaves the others as they are: a row of the product depends on its own row alone.
template <int kHeadDim>
struct QueryFragments {
  uint4 at[kHeadDim / 16][kWarpSize];

  // Where the elements from an even `dim` on are.
  __device__ Bf16* place(int query, int dim) {
    const int within = dim % 32, lane = query % kColumnQueries * 4 + within / 8;
    const int word = within / 2 % 2 * 2 + query / kColumnQueries;
    return reinterpret_cast<Bf16*>(&at[dim / 32 * 2 + within / 4 % 2][lane]) + word * 2;
  }
};

// What a lane holds of its warp's online softmax, in powers of two: queries 8 c + 2t and 8 c + 2t + 1 of each
// column c.
template <int kHeadDim, int kColumns, int kTiles>
struct WarpSoftmax {
  using Step = KvStep<kHeadDim, kTiles>;

  float high[kColumns];                     // of query 8 c + g the highest score, times log2(e)
  float weight[kColumns][4];                // the sum of exp2(score - high), as if there were one more dim whose values are 1
  float sum[kColumns][Step::kParts][2][4];  // of exp2(score - high) * v: the part's dims 0, 1 and then 2, 3, as fragments of an instruction
  uint32_t p[kColumns][kTiles][2];          // the step's weights, as fragments

  // body(sums, that is four values of queries 2t, 2t + 1, 2t, 2t + 1), of the weights too.
  template <typename Body>
  __device__ void for_sums(int c, const Body& body) {
    body(weight[c]);
#pragma unroll
    for (int part = 0; part < Step::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) body(sum[c][part][i]);
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      high[c] = -INFINITY;
      for_sums(c, [](float (&v)[4]) { v[0] = v[1] = v[2] = v[3] = 0.0f; });
    }
  }

  // The step's scores: [tokens 8 i .. + 7][queries g, tokens 2t and 2t + 1, then queries 8 + g].
  using Scores = float[Step::kKeys][4];

  __device__ static void score(Scores& scores, const Step& step, const QueryFragments<kHeadDim>& queries) {
#pragma unroll
    for (int i = 0; i < Step::kKeys; ++i) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
#pragma unroll
    for (int b = 0; b < Step::kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 q = queries.at[2 * b + half][threadIdx.x % kWarpSize];
#pragma unroll
        for (int i = 0; i < Step::kKeys; ++i) {
          const uint4 k = step.k[i][b];
          multiply_bf16(scores[i], {q.x, q.y, q.z, q.w}, {half == 0 ? k.x : k.z, half == 0 ? k.y : k.w});
        }
      }
    }
  }

  // From scores to weights, of the tokens whose bits are set in `present`. Weights are rounded before they are summed, so that what the
  // values are multiplied by adds up to one.
  __device__ void weigh(const Scores& scores, uint32_t present, float scale_log2, LaneId lane) {
    constexpr int kTokens = 2 * Step::kKeys;  // of a lane
    present >>= 2 * lane.t;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float weights[kTokens], highest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const float score = scores[i / 2][2 * c + i % 2] * scale_log2;
        weights[i] = (present >> (i / 2 * 8 + i % 2) & 1) != 0 ? score : -INFINITY;
        highest = fmaxf(highest, weights[i]);
      }
      const float before = high[c];
      high[c] = fmaxf(before, over_row(highest, [](float a, float b) { return fmaxf(a, b); }));
      const float base = high[c] == -INFINITY ? 0.0f : high[c];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) weights[i] = exp2_approx(weights[i] - base);
#pragma unroll
      for (int i = 0; i < Step::kKeys; ++i) p[c][i / 2][i % 2] = pack_bf16(weights[2 * i], weights[2 * i + 1]);
      // Nothing to scale down while all sums are zero, or where no maximum has grown.
      if (!__any_sync(kFullWarp, before != high[c] && before != -INFINITY)) continue;
      const float keep = weight2(before, high[c]);
      const float keeps[2] = {of_query(keep, 0, lane), of_query(keep, 1, lane)};
      for_sums(c, [&](float (&v)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] *= keeps[j % 2];
      });
    }
  }

  // What lanes know of query g, as lanes need it whose sums are of query 2t + i.
  __device__ static float of_query(float v, int i, LaneId lane) { return __shfl_sync(kFullWarp, v, lane.t * 8 + i * 4); }

  // Adds the step's weighted values, and its weights.
  __device__ void add(const Step& step) {
    constexpr uint32_t kOnes = 0x3f803f80;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < Step::kParts; ++part) {
        const uint2* v = &step.v[part][4 * tile];
        const uint32_t words[2][4] = {{v[0].x, v[1].x, v[2].x, v[3].x}, {v[0].y, v[1].y, v[2].y, v[3].y}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t (&word)[4] = words[i];
          const uint32_t a[4] = {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                                 __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)};
#pragma unroll
          for (int c = 0; c < kColumns; ++c) multiply_bf16(sum[c][part][i], a, p[c][tile]);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) multiply_bf16(weight[c], {kOnes, kOnes, kOnes, kOnes}, p[c][tile]);
    }
  }

  // Writes the first `heads` queries' sums, [query][stride], and weights, [query].
  template <int kStride>
  __device__ void store(float (*sums)[kStride], Weight* weights, int heads, LaneId lane) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = c * kColumnQueries + 2 * lane.t + i;
        const Weight own = {of_query(high[c], i, lane), weight[c][i]};
        if (query >= heads) continue;
        if (lane.g == 0) weights[query] = own;
#pragma unroll
        for (int part = 0; part < Step::kParts; ++part) {
          const float (&s)[2][4] = sum[c][part];
          const int dim = part / 2 * 64 + (part < 2 * Step::kChunks ? lane.g * 8 + part % 2 * 4 : lane.g * 4);
          *reinterpret_cast<float4*>(&sums[query][dim]) = {s[0][i], s[0][2 + i], s[1][i], s[1][2 + i]};
        }
      }
    }
  }
};

}  // namespace photon::cuda
