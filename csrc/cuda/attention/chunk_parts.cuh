// How chunk_attention cuts the context of a token into parts: one for each CTA of a cluster.
//
// How a context is cut depends on its length alone, so that a token has the same bits whatever else
// is in the step. A short context stays whole: to begin, and to add up the parts, takes a CTA as
// long as two or three tiles of keys, and a part of 1,024 positions would have no more than that.
#pragma once
#include <climits>
#include <cstdint>

#include "cuda/launch.cuh"

namespace photon::cuda {

constexpr int kTileKeys = 64;
constexpr int kParts = 7;         // CTAs of a cluster: of 7, 32 fit on an H200 at a time, which is
                                  // 256 tokens of 16 heads; of 8, only 30
constexpr int kWholeKeys = 1024;  // longest context that stays whole
static_assert(kWholeKeys / kTileKeys >= kParts, "every part of a cut context has a tile");

__host__ __device__ constexpr bool is_cut(int64_t length) { return length > kWholeKeys; }

// Positions [first, end) of a context.
struct Span {
  int32_t first, end;

  __device__ bool is_empty() const { return end <= first; }
};

// Part number `part` of a context that is cut: whole tiles of keys, except where the context ends.
// Neither end is earlier for a longer context.
__device__ inline Span part_of(int32_t length, int part) {
  const int tiles = (length + kTileKeys - 1) / kTileKeys;
  return {tiles * part / kParts * kTileKeys, min(tiles * (part + 1) / kParts * kTileKeys, length)};
}

}  // namespace photon::cuda
