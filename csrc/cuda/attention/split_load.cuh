// What keys and values of split attention are, and how a warp brings them from a tile into matrix
// instructions: the load stage of its kernel, and which scores and sums a lane has of it.
//
// bfloat16 lies in a tile as instructions take it. Queries, and then weights, are the rows of their
// left operand, up to 8 of them one half of its rows.
//
// Codes of e4m3 become float16 in registers, each of them exactly. Scales are not multiplied into
// them: those of keys multiply scores, and those of values multiply weights. To stay in the range
// of float16, each query is divided by a power of two, and the scales of a tile's values by one.
// Codes are the left operand, of which half as many instructions need no empty rows, and queries
// the columns of the right one.
//
// ldmatrix moves pairs of bytes. So of a key a lane gets four dims that follow one another, which
// it takes as columns 2t, 2t + 1, 2t + 8 and 2t + 9 of an instruction; queries have the same order.
// Of values, transposed, it gets two dims of each of two positions: the even one is row g, the odd
// one row g + 8. Positions follow in the order in which lanes have their weights: 0, 8, 1, 9, ...
#pragma once
#include <cuda_fp16.h>

#include "cuda/attention/kv_pack.cuh"
#include "cuda/attention/split_grid.cuh"
#include "cuda/bf16.cuh"
#include "cuda/ptx.cuh"

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

// A power of two that brings a magnitude to about 1.
struct BinaryScale {
  float scale, inverse;

  __device__ static BinaryScale of(uint32_t magnitude_bits) {
    constexpr uint32_t kExponent = 0x7f800000, kLeast = 1u << 23, kMost = 253u << 23;
    const uint32_t power = min(max(magnitude_bits & kExponent, kLeast), kMost);
    return {float_of_bits(power), float_of_bits(kLeast + kMost - power)};
  }
};

// Queries or weights, in the order in which a matrix instruction takes its left operand (or, turned
// around, its right one): [fragment of 16 columns][lane]. Where half of the rows are used, the
// words of the other half are not stored, and load() gives zeros for them.
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

// bfloat16.
struct Bf16Kv {
  using Element = Bf16;
  using Operand = Bf16;  // of matrix instructions
  using Grid = SplitGrid;
  static constexpr bool kIsScaled = false;
  static constexpr int kVector = kPack;   // elements of 16 bytes
  static constexpr int kTileTokens = 16;  // positions that a warp takes at a time

  static SplitGrid grid_of(const FusedAttentionDecodeParams&, const SplitGrid& grid) {
    return grid;
  }

  // --- what a lane has: of a query in each part, of four positions of a tile, of pairs of dims

  template <int kHalves>
  static constexpr int kParts = kHalves;
  static constexpr int kPieceDims = 8;              // of all lanes of a query, a pair each
  static constexpr int kFirstPeer = 1, kPeers = 4;  // the lanes of a query: lane ^ 1, ^ 2
  __device__ static int peer(LaneId lane) { return lane.t; }  // which of them it is
  __device__ static int query(int part) { return part * kHalfQueries + lane_id().g; }
  __device__ static int first_token() { return 2 * lane_id().t; }
  __device__ static constexpr int token(int i) { return i / 2 * 8 + i % 2; }  // from there

  // Where the weights of the positions 2 pair and 2 pair + 1 go: a fragment of the tile, and the
  // column of the first one.
  __device__ static constexpr int fragment(int) { return 0; }
  __device__ static int column(int pair) { return 8 * pair + 2 * lane_id().t; }
  __device__ static uint32_t pack(float low, float high) { return pack_bf16(low, high); }

  // Of 16 dims of a query, where one goes among an instruction's columns.
  __device__ static int query_column(int dim) { return dim; }

  template <int kHalves>
  struct Scores {
    float at[2][4];

    __device__ float of(int part, int i) const { return at[i / 2][2 * part + i % 2]; }
  };

  template <typename Shape, int kHalves, typename Queries>
  __device__ static void score(Scores<kHalves>& scores, const Queries& queries,
                               const unsigned char* tile) {
    const int lane = threadIdx.x % kWarpSize,
              first = Shape::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float parts[2][2][4] = {};  // two chains of instructions by turns, because an instruction waits
                                // for the one before in its chain
#pragma unroll
    for (int fragment = 0; fragment < Shape::kHeadDim / 16; ++fragment) {
      uint32_t query[4], key[4];
      load_matrices(key, tile + (first ^ fragment * 32));
      queries.load(query, fragment);
      multiply_bf16(parts[fragment % 2][0], query, {key[0], key[1]});
      multiply_bf16(parts[fragment % 2][1], query, {key[2], key[3]});
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores.at[i][j] = parts[0][i][j] + parts[1][i][j];
    }
  }

  // Weights times the values of the 16 dims that are number `dims` of the tile: add(part, i,
  // product) for each of a lane's sums of a part.
  template <typename Shape, int kHalves, typename Add>
  __device__ static void multiply(const uint32_t (&weights)[1][4], const unsigned char* tile,
                                  int dims, const Add& add) {
    const int lane = threadIdx.x % kWarpSize;
    uint32_t values[4];
    load_matrices_transposed(values, tile + Shape::place(lane % 16, 2 * dims + lane / 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float product[4] = {};
      multiply_bf16(product, weights[0], {values[2 * i], values[2 * i + 1]});
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) add(half, 2 * i + j, product[2 * half + j]);
      }
    }
  }
};

// e4m3 with a float32 scale for each position.
struct Fp8Kv {
  using Element = E4m3;
  using Operand = __half;
  using Grid = ScaledGrid;
  static constexpr bool kIsScaled = true;
  static constexpr int kVector = 16;
  static constexpr int kTileTokens = 32;  // as many bytes as of bfloat16

  static ScaledGrid grid_of(const FusedAttentionDecodeParams& p, const SplitGrid& grid) {
    return {grid, KvScales(p.cache)};
  }

  template <int kHalves>
  static constexpr int kParts = 2 * kHalves;
  static constexpr int kPieceDims = 16;
  static constexpr int kFirstPeer = 4, kPeers = 8;
  __device__ static int peer(LaneId lane) { return lane.g; }
  __device__ static int query(int part) {
    return part / 2 * kHalfQueries + 2 * lane_id().t + part % 2;
  }
  __device__ static int first_token() { return lane_id().g; }
  __device__ static constexpr int token(int i) { return 8 * i; }

  __device__ static constexpr int fragment(int pair) { return pair; }
  __device__ static int column(int) { return 2 * lane_id().g; }
  __device__ static uint32_t pack(float low, float high) { return pack_f16(low, high); }

  __device__ static int query_column(int dim) { return dim / 4 * 2 + dim % 4 / 2 * 8 + dim % 2; }

  template <int kHalves>
  struct Scores {
    float at[kHalves][2][4];

    __device__ float of(int part, int i) const { return at[part / 2][i / 2][i % 2 * 2 + part % 2]; }
  };

  template <typename Shape, int kHalves, typename Queries>
  __device__ static void score(Scores<kHalves>& scores, const Queries& queries,
                               const unsigned char* tile) {
    const int first = Shape::place(threadIdx.x % kWarpSize, 0);
    constexpr int kChains = 2 / kHalves;  // as many instructions do not wait for one another
    float parts[kChains][kHalves][2][4] = {};
#pragma unroll
    for (int fragment = 0; fragment < Shape::kHeadDim / 16; ++fragment) {
      uint32_t query[4], key[4];
      load_matrices(key, tile + (first ^ fragment * 16));
      queries.load(query, fragment);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 16 positions
        uint32_t low[2], high[2];    // of g and g + 8: the lower two dims, the upper two
        halves_of_e4m3(low, key[2 * i]);
        halves_of_e4m3(high, key[2 * i + 1]);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          multiply_f16(parts[fragment % kChains][half][i], {low[0], high[0], low[1], high[1]},
                       {query[half], query[2 + half]});
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int j = i % 4;
        float& score = scores.at[half][i / 4][j];
        score = parts[0][half][i / 4][j];
        if constexpr (kChains == 2) score += parts[1][half][i / 4][j];
      }
    }
  }

  template <typename Shape, int kHalves, typename Add>
  __device__ static void multiply(const uint32_t (&weights)[2][4], const unsigned char* tile,
                                  int dims, const Add& add) {
    constexpr unsigned kEvenThenOdd = 0x3120;
    const int lane = threadIdx.x % kWarpSize, row = lane % 16;
    uint32_t values[4];
    load_matrices_transposed(values,
                             tile + Shape::place(lane / 16 * 16 + row % 2 * 8 + row / 2, dims));
    float products[kHalves][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 16 positions
      uint32_t low[2], high[2];    // of the first eight and of the others: an even dim, an odd one
      halves_of_e4m3(low, __byte_perm(values[2 * i], 0, kEvenThenOdd));
      halves_of_e4m3(high, __byte_perm(values[2 * i + 1], 0, kEvenThenOdd));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        multiply_f16(products[half], {low[0], low[1], high[0], high[1]},
                     {weights[i][half], weights[i][2 + half]});
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) add(2 * half + i % 2, i / 2, products[half][i]);
    }
  }
};

}  // namespace photon::cuda
