// A matrix as tensor copies see it, a weight or many tokens: tiles of 8 rows by some K blocks of
// 64 columns, each brought into shared memory by one instruction.
//
// In shared memory an 8-row tile is its K blocks one after the other, a K block 8 rows of 128
// bytes, and the 16-byte vector v of row r lies at v ^ r, so that loads down a column of vectors
// meet all banks. What lies outside of the matrix arrives as zeros.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx.cuh"

namespace photon::cuda {

constexpr int kRowTileRows = 8, kKBlockColumns = 64;
constexpr int kKBlockBytes = kRowTileRows * kKBlockColumns * 2;

// A kernel parameter, __grid_constant__.
struct RowTileMap {
  CUtensorMap map;
};

// A matrix of bfloat16 as three dimensions, the first contiguous; strides in bytes, of the others.
inline int make_tensor_map(RowTileMap& row_tiles, const void* matrix, const cuuint64_t (&sizes)[3],
                           const cuuint64_t (&strides)[2], const cuuint32_t (&box)[3]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();  // or the next launch would find it
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(found)
               : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(&row_tiles.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// 8-row tiles of `k_blocks` K blocks, of a matrix of bfloat16 [rows, k], k a multiple of 64, whose
// address and row stride (in elements) are of whole 16-byte vectors. Many tokens are one 8-row tile
// of `row_tile_rows` rows, a multiple of 8: its K blocks have eights of rows one after the other,
// each as above.
inline int make_row_tile_map(RowTileMap& row_tiles, int k_blocks, const void* matrix, int64_t rows,
                             int64_t k, int64_t stride, int row_tile_rows = kRowTileRows) {
  const cuuint64_t sizes[] = {kKBlockColumns, static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(k / kKBlockColumns)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2,
                                kKBlockColumns * 2};  // bytes; of rows and of K blocks
  const cuuint32_t box[] = {kKBlockColumns, static_cast<cuuint32_t>(row_tile_rows),
                            static_cast<cuuint32_t>(k_blocks)};
  return make_tensor_map(row_tiles, matrix, sizes, strides, box);
}

// One thread: starts the copy of the 8-row tile that begins at `row` and at column 64 * `k_block`;
// all its bytes count towards `barrier`.
__device__ inline void copy_row_tile(void* shared, const RowTileMap& row_tiles, int row,
                                     int k_block, Barrier* barrier, uint64_t policy) {
  tensor_copy(shared, &row_tiles.map, {0, row, k_block}, barrier, policy);
}

// One thread: the map is fetched before the first copy needs it.
__device__ inline void prefetch_row_tile_map(const RowTileMap& row_tiles) {
  prefetch_tensor_map(&row_tiles.map);
}

}  // namespace photon::cuda
