// How chunk_attention cuts the past of a line into parts, of which a cluster's blocks take one each.
//
// A chunk of few lines has too few tiles to keep all multiprocessors busy. Whether a past is cut depends on how many lines its chunk has,
// and how it is cut on its length alone, so that a line has the same bits whatever else is in the step: blocks that have no part of a short
// past end at once, or help where the parts meet.
#pragma once
#include <climits>
#include <cstdint>

#include "cuda/launch.cuh"

namespace photon::cuda {

constexpr int kTileKeys = 64;
constexpr int kMostParts = 7;  // blocks of a cluster: of 7, 32 fit on an H200 at a time, which is 256 lines of 16 heads; of 8, only 30
constexpr int kPartTiles = 4;  // tiles of keys that are worth a block: it takes as long as one or two of them to begin and to meet

// Query rows (lines times query heads) for each multiprocessor from which on the pasts of a chunk stay whole: three quarters of a large
// tile. On an H200, with head_dim 128, tiles that walk whole pasts reach 2 TFLOP/s each until every multiprocessor has one, and clusters
// 130 to 240 together, at pasts of 2,048 to 32,512, however many tiles there are: the two are even at 64 to 115 tiles for 132
// multiprocessors.
constexpr int kWholeRows = 96;

// Parts of a past of this length; never fewer for a longer one.
__host__ __device__ constexpr int parts_of(int64_t length) {
  const int64_t parts = ceil_div(length, kTileKeys * kPartTiles);
  return static_cast<int>(parts < kMostParts ? parts : kMostParts);
}

// Positions [first, end) of a past.
struct Span {
  int32_t first, end;

  __device__ bool is_empty() const { return end <= first; }
};

// Part number `part` of a past that is cut into `parts`: whole tiles of keys, except where the past ends. Empty where there is no such
// part.
__device__ inline Span part_of(int32_t length, int part, int parts) {
  if (part >= parts) return {0, 0};
  const int tiles = (length + kTileKeys - 1) / kTileKeys;
  return {tiles * part / parts * kTileKeys, min(tiles * (part + 1) / parts * kTileKeys, length)};
}

}  // namespace photon::cuda
