// The matrix instructions of a warpgroup of even_attention. Scores are those of tall_multiply.cuh,
// with queries for tokens and keys for rows of a weight. Here are those of weights and values:
// d[64][columns] += a[64][16] b[16][columns], a in registers as multiply_bf16() takes it, b 16 rows
// of the first slice of 64 columns, in shared memory. Its eights of rows follow each other, and its
// slices are kSliceStride bytes apart.
#pragma once
#include "cuda/tall_multiply.cuh"

namespace photon::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define PHOTON_MULTIPLY_VALUES(columns, registers, a_numbers, b_number)                           \
  __device__ inline void multiply_values(float (&d)[registers], const uint32_t (&a)[4],           \
                                         uint64_t b) {                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                     \
                 "k16.f32.bf16.bf16 {" PHOTON_NAMES_##registers "}, {" a_numbers "}, %" #b_number \
                                                                ", 1, 1, 1, 1;"                   \
                 : PHOTON_SUMS_##registers                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }

PHOTON_MULTIPLY_VALUES(64, 32, "%32,%33,%34,%35", 36)
PHOTON_MULTIPLY_VALUES(128, 64, "%64,%65,%66,%67", 68)

template <int kSliceStride, int kRegisters>
__device__ inline void multiply_values(float (&d)[kRegisters], const uint32_t (&a)[4],
                                       const HalfTileFragment& b) {
  HalfTileFragment slices = b;
  slices.at += (kSliceStride / 16 - 1) << 16;  // in the place of kUnusedStride
  multiply_values(d, a, describe_half_tiles<kSliceBytes>(slices, 0));
}

// Operands in registers: not computed behind warpgroup_begin(), nor overwritten ahead of a wait.
template <int kRows>
__device__ inline void warpgroup_settle(uint32_t (&a)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

#else

template <int kSliceStride, int kRegisters>
__device__ inline void multiply_values(float (&d)[kRegisters], const uint32_t (&a)[4],
                                       const HalfTileFragment& b) {
  const int lane = threadIdx.x % 32, row = lane % 8, half_tile = lane / 8 % 2, vector = lane / 16;
#pragma unroll
  for (int n = 0; n < kRegisters / 4; n += 2) {
    uint32_t rows[4];
    load_matrices_transposed(
        rows, swizzled_vector(b.at + n / 8 * kSliceStride + half_tile * kSliceBytes, row, n % 8 / 2,
                              vector));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[(n + i) * 4]);
      multiply_bf16(sums, a, {rows[2 * i], rows[2 * i + 1]});
    }
  }
}

template <int kRows>
__device__ inline void warpgroup_settle(uint32_t (&)[kRows][4]) {}

#endif

}  // namespace photon::cuda
