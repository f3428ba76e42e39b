// The scales of a tile's rows in the narrow linears (narrow_linear.cuh), from shared memory to
// registers.
#pragma once
#include "cuda/linear/narrow_load.cuh"

namespace photon::cuda::stream_linear::narrow {

// The scales of a tile's rows `group` and `group` + 8, and int4's zero points or offsets. read():
// `scale`, `zero`: of the first of the rows. Returns what depends on all that was read.
template <typename Load, bool kIsScaled = Load::kIsScaled, bool kIsPacked = Load::kIsPacked>
struct TileScales {};

template <typename Load>
struct TileScales<Load, true, false> {
  static constexpr bool kHasPoints = Load::kZeros == Zeros::kPoints;

  float scales[2], points[2];

  __device__ uint32_t read(const StoredScales& stored, const unsigned char* scale,
                           const unsigned char* zero) {
    uint32_t loaded = 0;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      scales[high] = Load::scale(stored, scale + high * kRowTileRows * Load::kScalePitch);
      loaded |= __float_as_uint(scales[high]);
      if constexpr (kHasPoints) {
        points[high] = zero[high * kRowTileRows * Load::kZeroPitch];
        loaded |= __float_as_uint(points[high]);
      }
    }
    return loaded;
  }
  __device__ float of(const StoredScales&, int, int high) const { return scales[high]; }
  __device__ float point(int, int high) const { return points[high]; }
};

// They are widened when they are asked for.
template <typename Load>
struct TileScales<Load, true, true> {
  PackedScales<Load::kGroups, Load::kZeros> rows[2];

  __device__ uint32_t read(const StoredScales& stored, const unsigned char* scale,
                           const unsigned char* zero) {
    uint32_t loaded = 0;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      PackedScales<Load::kGroups, Load::kZeros>& row = rows[high];
      row.load(scale + high * kRowTileRows * Load::kScalePitch,
               zero + high * kRowTileRows * Load::kZeroPitch, stored.has_all_groups);
      loaded |= row.scales.words[0];
      if constexpr (Load::kZeros == Zeros::kPoints) loaded |= row.points.bytes;
      if constexpr (Load::kZeros == Zeros::kOffsets) loaded |= row.offsets.words[0];
    }
    return loaded;
  }
  __device__ float of(const StoredScales& stored, int group, int high) const {
    return rows[high].scales.of(group, Load::kIsHalf || stored.is_half);
  }
  __device__ float point(int group, int high) const { return rows[high].points.of(group); }
  __device__ float offset(int group, int high) const { return offset_of_wide(rows[high], group); }
};

}  // namespace photon::cuda::stream_linear::narrow
