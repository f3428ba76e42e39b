// The scales of a K block of a lane's two rows, from memory to registers (mid_stored.cuh).
#pragma once
#include "cuda/linear/mid_stored_tiles.cuh"

namespace photon::cuda::stream_linear::mid_stored {

// The lane's rows: how many scales come before those of the CTA's first K block.
struct ScaleRows {
  uint32_t before[2];

  ScaleRows() = default;
  __device__ ScaleRows(const Scales& scales, int low, int high, int first_block)
      : before{of_row(scales, low, first_block), of_row(scales, high, first_block)} {}

 private:
  __device__ static uint32_t of_row(const Scales& scales, int row, int block) {
    return (row >> scales.row_shift) * scales.row_groups + block * scales.block_groups;
  }
};

// load() begins to fetch them, and of(), point() and offset() have them of a group and a row. Of a
// weight without zero points or offsets nobody asks for these.
template <typename Load>
struct BlockScales;

template <>
struct BlockScales<narrow::Fp8Load> {
  float scales[2];

  __device__ void load(const Scales& from, const ScaleRows& rows, int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales[i] = static_cast<const float*>(from.data)[rows.before[i] + block * from.block_groups];
  }
  __device__ float of(const Scales&, int, int row) const { return scales[row]; }
};

template <int kStageTiles, narrow::Zeros kZeros>
struct BlockScales<narrow::Int4Load<1, kStageTiles, kZeros>> {
  static constexpr bool kHasPoints = kZeros == narrow::Zeros::kPoints;

  uint16_t scales[2];
  uint8_t points[2];

  __device__ void load(const Scales& from, const ScaleRows& rows, int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = static_cast<const uint16_t*>(from.data)[rows.before[i] + block];
      if (kHasPoints) points[i] = static_cast<const uint8_t*>(from.zeros)[rows.before[i] + block];
    }
  }
  __device__ float of(const Scales& from, int, int row) const {
    return wide(scales[row], from.is_half);
  }
  __device__ float point(int, int row) const { return points[row]; }
};

// Several scales a K block; or half as many in memory, each for two groups.
template <int kGroups, narrow::Zeros kZeros, bool kIsHalf>
struct PackedBlockScales {
  narrow::PackedScales<kGroups, kZeros> rows[2];

  __device__ void load(const Scales& from, const ScaleRows& at, int block) {
    constexpr int kZeroBytes = kZeros == narrow::Zeros::kOffsets ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t place = at.before[i] + block * from.block_groups;
      rows[i].load(static_cast<const uint16_t*>(from.data) + place,
                   static_cast<const uint8_t*>(from.zeros) + place * kZeroBytes,
                   from.block_groups == kGroups);
    }
  }
  __device__ float of(const Scales& from, int group, int row) const {
    return rows[row].scales.of(group, kIsHalf || from.is_half);
  }
  __device__ float point(int group, int row) const { return rows[row].points.of(group); }
  __device__ float offset(int group, int row) const {
    return narrow::offset_of_wide(rows[row], group);
  }
};

template <typename Load>
using PackedScalesOf = PackedBlockScales<Load::kGroups, Load::kZeros, Load::kIsHalf>;

template <int kGroups>
struct BlockScales<narrow::Int8Load<kGroups>> : PackedScalesOf<narrow::Int8Load<kGroups>> {};

template <int kStageTiles, narrow::Zeros kZeros>
struct BlockScales<narrow::Int4Load<4, kStageTiles, kZeros>>
    : PackedScalesOf<narrow::Int4Load<4, kStageTiles, kZeros>> {};

}  // namespace photon::cuda::stream_linear::mid_stored
