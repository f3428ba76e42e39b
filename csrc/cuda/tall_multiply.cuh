// The matrix instructions of a warp group whose left operand is 64 tokens and whose right one is
// rows of a weight: d[64][rows] = or += x[64][16] w[rows][16]. Both operands lie in shared memory
// as tensor copies leave them (half_tile_map.cuh), boxes of one slice of 64 columns. Warp w of the
// group has tokens 16 w .. + 15 of d, and of each eight rows n what multiply_bf16() has:
// d[4 n + i].
//
// A sum has the bits of the instructions of stream_wide.cuh, where the weight is the left operand:
// both add the same 16 products to it.
#pragma once
#include "cuda/warpgroup.cuh"

namespace photon::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A group's instructions run until it waits; those between two calls of this are waited for
// together.
__device__ inline void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when all but the last kPending commits are done, and what they read may be overwritten.
template <int kPending>
__device__ inline void warpgroup_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Behind the wait for all: sums are not read ahead of it.
template <int kRegisters>
__device__ inline void warpgroup_settle(float (&d)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The registers' numbers and the registers of d, four for each eight rows of the weight.
#define PHOTON_NAMES_4 "%0,%1,%2,%3"
#define PHOTON_NAMES_8 PHOTON_NAMES_4 ",%4,%5,%6,%7"
#define PHOTON_NAMES_12 PHOTON_NAMES_8 ",%8,%9,%10,%11"
#define PHOTON_NAMES_16 PHOTON_NAMES_12 ",%12,%13,%14,%15"
#define PHOTON_NAMES_20 PHOTON_NAMES_16 ",%16,%17,%18,%19"
#define PHOTON_NAMES_24 PHOTON_NAMES_20 ",%20,%21,%22,%23"
#define PHOTON_NAMES_32 PHOTON_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PHOTON_NAMES_40 PHOTON_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PHOTON_NAMES_48 PHOTON_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PHOTON_NAMES_56 PHOTON_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PHOTON_NAMES_64 PHOTON_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define PHOTON_NAMES_72 PHOTON_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define PHOTON_NAMES_76 PHOTON_NAMES_72 ",%72,%73,%74,%75"
#define PHOTON_NAMES_80 PHOTON_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define PHOTON_NAMES_88 PHOTON_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PHOTON_NAMES_96 PHOTON_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"

#define PHOTON_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PHOTON_SUMS_8 PHOTON_FOUR(0), PHOTON_FOUR(4)
#define PHOTON_SUMS_12 PHOTON_SUMS_8, PHOTON_FOUR(8)
#define PHOTON_SUMS_16 PHOTON_SUMS_12, PHOTON_FOUR(12)
#define PHOTON_SUMS_20 PHOTON_SUMS_16, PHOTON_FOUR(16)
#define PHOTON_SUMS_24 PHOTON_SUMS_20, PHOTON_FOUR(20)
#define PHOTON_SUMS_32 PHOTON_SUMS_24, PHOTON_FOUR(24), PHOTON_FOUR(28)
#define PHOTON_SUMS_40 PHOTON_SUMS_32, PHOTON_FOUR(32), PHOTON_FOUR(36)
#define PHOTON_SUMS_48 PHOTON_SUMS_40, PHOTON_FOUR(40), PHOTON_FOUR(44)
#define PHOTON_SUMS_56 PHOTON_SUMS_48, PHOTON_FOUR(48), PHOTON_FOUR(52)
#define PHOTON_SUMS_64 PHOTON_SUMS_56, PHOTON_FOUR(56), PHOTON_FOUR(60)
#define PHOTON_SUMS_72 PHOTON_SUMS_64, PHOTON_FOUR(64), PHOTON_FOUR(68)
#define PHOTON_SUMS_76 PHOTON_SUMS_72, PHOTON_FOUR(72)
#define PHOTON_SUMS_80 PHOTON_SUMS_72, PHOTON_FOUR(72), PHOTON_FOUR(76)
#define PHOTON_SUMS_88 PHOTON_SUMS_80, PHOTON_FOUR(80), PHOTON_FOUR(84)
#define PHOTON_SUMS_96 PHOTON_SUMS_88, PHOTON_FOUR(88), PHOTON_FOUR(92)

// The instruction for so many rows, half as many registers; x, w and adds are the operands behind
// these. `adds`: to what d holds; else d is overwritten.
#define PHOTON_MULTIPLY_ROWS(rows, registers, x_number, w_number, adds_number)                     \
  __device__ inline void multiply_rows(float (&d)[registers], uint64_t x, uint64_t w, bool adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #adds_number                           \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #rows                                   \
                 "k16.f32.bf16.bf16 {" PHOTON_NAMES_##registers "}, %" #x_number ", %" #w_number   \
                                                                ", adds, 1, 1, 0, 0;\n}"           \
                 : PHOTON_SUMS_##registers                                                         \
                 : "l"(x), "l"(w), "r"(static_cast<int>(adds)));                                   \
  }

PHOTON_MULTIPLY_ROWS(16, 8, 8, 9, 10)
PHOTON_MULTIPLY_ROWS(24, 12, 12, 13, 14)
PHOTON_MULTIPLY_ROWS(32, 16, 16, 17, 18)
PHOTON_MULTIPLY_ROWS(40, 20, 20, 21, 22)
PHOTON_MULTIPLY_ROWS(48, 24, 24, 25, 26)
PHOTON_MULTIPLY_ROWS(64, 32, 32, 33, 34)
PHOTON_MULTIPLY_ROWS(80, 40, 40, 41, 42)
PHOTON_MULTIPLY_ROWS(96, 48, 48, 49, 50)
PHOTON_MULTIPLY_ROWS(112, 56, 56, 57, 58)
PHOTON_MULTIPLY_ROWS(128, 64, 64, 65, 66)
PHOTON_MULTIPLY_ROWS(144, 72, 72, 73, 74)
PHOTON_MULTIPLY_ROWS(152, 76, 76, 77, 78)
PHOTON_MULTIPLY_ROWS(160, 80, 80, 81, 82)
PHOTON_MULTIPLY_ROWS(176, 88, 88, 89, 90)
PHOTON_MULTIPLY_ROWS(192, 96, 96, 97, 98)

template <int kRegisters>
__device__ inline void multiply_rows(float (&d)[kRegisters], const HalfTileFragment& x,
                                     const HalfTileFragment& w, int depth, bool adds) {
  multiply_rows(d, describe_half_tiles<kSliceBytes>(x, depth),
                describe_half_tiles<kSliceBytes>(w, depth), adds);
}

#else

__device__ inline void warpgroup_commit() {}
template <int kPending>
__device__ inline void warpgroup_wait_but() {
  __syncwarp();
}
template <int kRegisters>
__device__ inline void warpgroup_settle(float (&)[kRegisters]) {}

template <int kRegisters>
__device__ inline void multiply_rows(float (&d)[kRegisters], const HalfTileFragment& x,
                                     const HalfTileFragment& w, int depth, bool adds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8, row = lane % 8;
  uint32_t tokens[4];
  load_matrices(tokens, swizzled_vector(x.at + (2 * warp + matrix % 2) * kSliceBytes, row, depth,
                                        matrix / 2));
#pragma unroll
  for (int n = 0; n < kRegisters / 4; ++n) {
    uint32_t rows[4];  // the last two are not used
    load_matrices(rows, swizzled_vector(w.at + n * kSliceBytes, row, depth, matrix % 2));
    float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[n * 4]);
    if (!adds) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    multiply_bf16(sums, tokens, {rows[0], rows[1]});
  }
}

#endif

}  // namespace photon::cuda
