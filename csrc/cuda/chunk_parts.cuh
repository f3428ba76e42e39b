// How chunk_attention cuts the context of a token into parts, of which a cluster's CTAs take one
// each.
//
// How a context is cut depends on its length alone, so that a token has the same bits whatever else
// is in the step. A short context stays whole: to go through it takes a CTA little longer than to
// begin and to add up parts. CTAs that have no part of a longer one help to add up the parts.
#pragma once
#include <climits>
#include <cstdint>

#include "cuda/launch.cuh"

namespace photon::cuda {

constexpr int kTileKeys = 64;
constexpr int kMostParts = 7;    // CTAs of a cluster: of 7, 32 fit on an H200 at a time, which is
                                 // 256 tokens of 16 heads; of 8, only 30
constexpr int kPartTiles = 2;    // tiles of keys that are worth a CTA: to begin, and to add up the
                                 // parts, takes it as long as one or two of them
constexpr int kWholeKeys = 512;  // longest context that stays whole

// Parts of a context of this length; never fewer for a longer one.
__host__ __device__ constexpr int parts_of(int64_t length) {
  if (length <= kWholeKeys) return 1;
  const int64_t parts = ceil_div(length, kTileKeys * kPartTiles);
  return static_cast<int>(parts < kMostParts ? parts : kMostParts);
}

// Positions [first, end) of a context.
struct Span {
  int32_t first, end;

  __device__ bool is_empty() const { return end <= first; }
};

// Part number `part` of a context that is cut into `parts`: whole tiles of keys, except where the
// context ends. Empty where there is no such part.
__device__ inline Span part_of(int32_t length, int part, int parts) {
  if (part >= parts) return {0, 0};
  const int tiles = (length + kTileKeys - 1) / kTileKeys;
  return {tiles * part / parts * kTileKeys, min(tiles * (part + 1) / parts * kTileKeys, length)};
}

}  // namespace photon::cuda
