// A matrix as tensor copies see it, a weight or many tokens: half tiles of 8 rows by some slices of
// 64 columns, each brought into shared memory by one instruction.
//
// In shared memory a half tile is its slices one after the other, a slice 8 rows of 128 bytes, and
// the 16-byte vector v of row r lies at v ^ r, so that loads down a column of vectors meet all
// banks. What lies outside of the matrix arrives as zeros.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx.cuh"

namespace photon::cuda {

constexpr int kHalfTileRows = 8, kSliceColumns = 64;
constexpr int kSliceBytes = kHalfTileRows * kSliceColumns * 2;
constexpr int kHalfTileAlignment = 1024;  // in shared memory

// A kernel parameter, __grid_constant__.
struct HalfTileMap {
  CUtensorMap map;
};

// A matrix of bfloat16 as three dimensions, the first contiguous; strides in bytes, of the others.
inline int make_tensor_map(HalfTileMap& half_tiles, const void* matrix,
                           const cuuint64_t (&sizes)[3], const cuuint64_t (&strides)[2],
                           const cuuint32_t (&box)[3]) {
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
      encode(&half_tiles.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Half tiles of `slices` slices, of a matrix of bfloat16 [rows, k], k a multiple of 64, whose
// address and row stride (in elements) are of whole 16-byte vectors. Many tokens are one half tile
// of `half_tile_rows` rows, a multiple of 8: its slices have eights of rows one after the other,
// each as above.
inline int make_half_tile_map(HalfTileMap& half_tiles, int slices, const void* matrix, int64_t rows,
                              int64_t k, int64_t stride, int half_tile_rows = kHalfTileRows) {
  const cuuint64_t sizes[] = {kSliceColumns, static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(k / kSliceColumns)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2,
                                kSliceColumns * 2};  // bytes; of rows and of slices
  const cuuint32_t box[] = {kSliceColumns, static_cast<cuuint32_t>(half_tile_rows),
                            static_cast<cuuint32_t>(slices)};
  return make_tensor_map(half_tiles, matrix, sizes, strides, box);
}

// One thread: starts the copy of the half tile that begins at `row` and at column 64 * `slice`; all
// its bytes count towards `barrier`.
__device__ inline void copy_half_tile(void* shared, const HalfTileMap& half_tiles, int row,
                                      int slice, Barrier* barrier, uint64_t policy) {
  tensor_copy(shared, &half_tiles.map, {0, row, slice}, barrier, policy);
}

// One thread: the map is fetched before the first copy needs it.
__device__ inline void prefetch_half_tile_map(const HalfTileMap& half_tiles) {
  prefetch_tensor_map(&half_tiles.map);
}

}  // namespace photon::cuda
