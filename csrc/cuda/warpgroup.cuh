// Matrix instructions of a warpgroup: four warps in a row, from a multiple of four on.
// d[64][columns] += a[64][16] b[columns][16], both operands in shared memory as a tensor copy
// leaves them (half_tile_map.cuh): half tiles of 8 rows, some bytes apart. `a` and `b` are a slice
// of 64 columns of the first half tile, and `depth` says which 16 of them are multiplied.
//
// Warp w of the group has rows 16 w .. + 15 of d, and of each eight columns n what multiply_bf16()
// has: d[4 n + i].
//
// Compute capability 9.0 has such instructions, and runs them beside the warps until they wait.
// Elsewhere a warp does its part with those of a warp, at once; the sums are the same.
#pragma once
#include "cuda/half_tile_map.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

// A warp group that needs few registers leaves them to those that need more; each says how many
// its threads go on with. All of a kernel are shared out so that they fit.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL)
template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#else
template <int kRegisters>
__device__ inline void shrink_registers() {}
template <int kRegisters>
__device__ inline void grow_registers() {}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Before the first instruction, and where others have touched d.
__device__ inline void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Returns when all instructions have read their operands and d has their sums.
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// A slice of an operand, as instructions are told of it: its address in units of 16 bytes, and a
// stride that they do not use. What lies a constant way from there costs an addition of 32 bits.
struct HalfTileFragment {
  static constexpr uint32_t kUnusedStride = 1u << 16;

  uint32_t at;

  __device__ explicit HalfTileFragment(const unsigned char* first)
      : at(shared_address(first) / 16 + kUnusedStride) {}

  __device__ HalfTileFragment after(int bytes) const {
    HalfTileFragment moved = *this;
    moved.at += bytes / 16;
    return moved;
  }
};

// With the other half: the way from half tile to half tile, in units of 16 bytes, and the swizzle.
template <int kHalfTileStride>
__device__ inline uint64_t describe_half_tiles(const HalfTileFragment& fragment, int depth) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  uint64_t description;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(description)
      : "r"(fragment.at + depth * 2), "n"(kSwizzle128 | kHalfTileStride / 16));
  return description;
}

// One instruction for each count of columns: its registers are part of its text.
__device__ inline void multiply_described(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, "
      "1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b));
}

__device__ inline void multiply_described(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, "
      "0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
}

__device__ inline void multiply_described(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}

template <int kStrideOfA, int kStrideOfB, int kRegisters>
__device__ inline void warpgroup_multiply(float (&d)[kRegisters], const HalfTileFragment& a,
                                          const HalfTileFragment& b, int depth) {
  multiply_described(d, describe_half_tiles<kStrideOfA>(a, depth),
                     describe_half_tiles<kStrideOfB>(b, depth));
}

#else

__device__ inline void warpgroup_begin() {}
__device__ inline void warpgroup_wait() { __syncwarp(); }

struct HalfTileFragment {
  const unsigned char* at;

  __device__ explicit HalfTileFragment(const unsigned char* first) : at(first) {}
  __device__ HalfTileFragment after(int bytes) const { return HalfTileFragment(at + bytes); }
};

// Eight columns of a row of a half tile: the first or the second half of the 16.
__device__ inline const unsigned char* swizzled_vector(const unsigned char* half_tile, int row,
                                                       int depth, int half) {
  return half_tile + row * kSliceColumns * 2 + ((depth * 2 + half) ^ row) * 16;
}

template <int kStrideOfA, int kStrideOfB, int kRegisters>
__device__ inline void warpgroup_multiply(float (&d)[kRegisters], const HalfTileFragment& a,
                                          const HalfTileFragment& b, int depth) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8, row = lane % 8;
  uint32_t rows[4];
  load_matrices(
      rows, swizzled_vector(a.at + (2 * warp + matrix % 2) * kStrideOfA, row, depth, matrix / 2));
#pragma unroll
  for (int n = 0; n < kRegisters / 4; n += 2) {
    uint32_t columns[4];
    load_matrices(columns,
                  swizzled_vector(b.at + (n + matrix / 2) * kStrideOfB, row, depth, matrix % 2));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[(n + i) * 4]);
      multiply_bf16(sums, rows, {columns[2 * i], columns[2 * i + 1]});
    }
  }
}

#endif

}  // namespace photon::cuda
