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

// load() begins to fetch them, and of() and excess() have them of a group and a row. Of a weight
// without zero points nobody asks for an excess.
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

template <int kStageTiles, bool kHasZeros>
struct BlockScales<narrow::Int4Load<1, kStageTiles, kHasZeros>> {
  uint16_t scales[2];
  uint8_t zeros[2];

  __device__ void load(const Scales& from, const ScaleRows& rows, int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = static_cast<const uint16_t*>(from.data)[rows.before[i] + block];
      if (kHasZeros) zeros[i] = from.zeros[rows.before[i] + block];
    }
  }
  __device__ float of(const Scales& from, int, int row) const {
    return wide(scales[row], from.is_half);
  }
  __device__ float excess(int, int row) const { return 128.0f + zeros[row]; }
};

// Of four groups, or of two that are taken for two each.
template <int kStageTiles, bool kHasZeros>
struct BlockScales<narrow::Int4Load<4, kStageTiles, kHasZeros>> {
  uint32_t scales[2][2];  // a pair of groups each
  uint32_t zeros[2];

  __device__ void load(const Scales& from, const ScaleRows& rows, int block) {
    const bool is_whole = from.block_groups == 4;
    const uint32_t first = block * from.block_groups;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = (rows.before[i] + first) / 2, other = pair + (is_whole ? 1 : 0);
      const uint32_t* const words = static_cast<const uint32_t*>(from.data);
      scales[i][0] = words[pair];
      scales[i][1] = words[other];
      if (!is_whole) {
        scales[i][0] = __byte_perm(scales[i][0], 0, 0x1010);
        scales[i][1] = __byte_perm(scales[i][1], 0, 0x3232);
      }
      if (!kHasZeros) continue;
      const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from.zeros);
      zeros[i] = __byte_perm(halves[pair], halves[other], is_whole ? 0x5410 : 0x1100);
    }
  }
  __device__ float of(const Scales& from, int group, int row) const {
    return wide(scales[row][group / 2] >> group % 2 * 16 & 0xffffu, from.is_half);
  }
  __device__ float excess(int group, int row) const {
    return 128.0f + static_cast<float>(zeros[row] >> group * 8 & 0xffu);
  }
};

}  // namespace photon::cuda::stream_linear::mid_stored
