// Matrix instructions of a warpgroup: four warps in a row, from a multiple of four on.
// d[64][columns] += a[64][16] b[columns][16], both operands in shared memory as a tensor copy
// leaves them (row_tile_map.cuh): tiles of 8 rows, some bytes apart. `a` and `b` are a K block
// of 64 columns of the first 8-row tile, and `depth` says which 16 of them are multiplied.
//
// Warp w of the group has rows 16 w .. + 15 of d, and of each eight columns n what multiply_bf16()
// has: d[4 n + i].
//
// Compute capability 9.0 has such instructions, and runs them beside the warps until they wait.
// Elsewhere a warp does its part with those of a warp, at once; the sums are the same.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/row_tile_map.cuh"

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

// A K block of an operand, as instructions are told of it: its address in units of 16 bytes, and a
// stride that they do not use. What lies a constant way from there costs an addition of 32 bits.
struct RowTileFragment {
  static constexpr uint32_t kUnusedStride = 1u << 16;

  uint32_t at;

  __device__ explicit RowTileFragment(const unsigned char* first)
      : at(shared_address(first) / 16 + kUnusedStride) {}

  __device__ RowTileFragment after(int bytes) const {
    RowTileFragment moved = *this;
    moved.at += bytes / 16;
    return moved;
  }
};

// With the other half: the way from 8-row tile to 8-row tile, in units of 16 bytes, and the
// swizzle.
template <int kRowTileStride>
__device__ inline uint64_t describe_row_tiles(const RowTileFragment& fragment, int depth) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  uint64_t description;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(description)
      : "r"(fragment.at + depth * 2), "n"(kSwizzle128 | kRowTileStride / 16));
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
__device__ inline void warpgroup_multiply(float (&d)[kRegisters], const RowTileFragment& a,
                                          const RowTileFragment& b, int depth) {
  multiply_described(d, describe_row_tiles<kStrideOfA>(a, depth),
                     describe_row_tiles<kStrideOfB>(b, depth));
}

#else

__device__ inline void warpgroup_begin() {}
__device__ inline void warpgroup_wait() { __syncwarp(); }

struct RowTileFragment {
  const unsigned char* at;

  __device__ explicit RowTileFragment(const unsigned char* first) : at(first) {}
  __device__ RowTileFragment after(int bytes) const { return RowTileFragment(at + bytes); }
};

// Eight columns of a row of an 8-row tile: the first or the second half of the 16.
__device__ inline const unsigned char* swizzled_vector(const unsigned char* row_tile, int row,
                                                       int depth, int half) {
  return row_tile + row * kKBlockColumns * 2 + ((depth * 2 + half) ^ row) * 16;
}

template <int kStrideOfA, int kStrideOfB, int kRegisters>
__device__ inline void warpgroup_multiply(float (&d)[kRegisters], const RowTileFragment& a,
                                          const RowTileFragment& b, int depth) {
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

// --- instructions that run until they are waited for ---------------------------------------------
//
// multiply_rows(): the left operand is 64 tokens, the right one rows of a weight: d[64][rows] = or
// += x[64][16] w[rows][16]. Both operands lie in shared memory as tensor copies leave them
// (row_tile_map.cuh), boxes of one K block of 64 columns. Warp w of the group has tokens 16 w .. +
// 15 of d, and of each eight rows n what multiply_bf16() has: d[4 n + i].
//
// A sum has the bits of the instructions of mid_linear.cuh, where the weight is the left operand:
// both add the same 16 products to it.

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
// these. `adds`: to what d holds; else d is overwritten. `type`: of 32 bytes of a row of each.
#define PHOTON_MULTIPLY_ROWS(name, type, orders, rows, registers, x_number, w_number, adds_number) \
  __device__ inline void name(float (&d)[registers], uint64_t x, uint64_t w, bool adds) {          \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #adds_number                           \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #rows type                              \
                 " {" PHOTON_NAMES_##registers "}, %" #x_number ", %" #w_number                    \
                                               ", adds, 1, 1" orders ";\n}"                        \
                 : PHOTON_SUMS_##registers                                                         \
                 : "l"(x), "l"(w), "r"(static_cast<int>(adds)));                                   \
  }
#define PHOTON_MULTIPLY_BF16(...) \
  PHOTON_MULTIPLY_ROWS(multiply_rows, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)
#define PHOTON_MULTIPLY_E4M3(...) \
  PHOTON_MULTIPLY_ROWS(multiply_e4m3_rows, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)

PHOTON_MULTIPLY_BF16(16, 8, 8, 9, 10)
PHOTON_MULTIPLY_BF16(24, 12, 12, 13, 14)
PHOTON_MULTIPLY_BF16(32, 16, 16, 17, 18)
PHOTON_MULTIPLY_BF16(40, 20, 20, 21, 22)
PHOTON_MULTIPLY_BF16(48, 24, 24, 25, 26)
PHOTON_MULTIPLY_BF16(64, 32, 32, 33, 34)
PHOTON_MULTIPLY_BF16(80, 40, 40, 41, 42)
PHOTON_MULTIPLY_BF16(96, 48, 48, 49, 50)
PHOTON_MULTIPLY_BF16(112, 56, 56, 57, 58)
PHOTON_MULTIPLY_BF16(128, 64, 64, 65, 66)
PHOTON_MULTIPLY_BF16(144, 72, 72, 73, 74)
PHOTON_MULTIPLY_BF16(152, 76, 76, 77, 78)
PHOTON_MULTIPLY_BF16(160, 80, 80, 81, 82)
PHOTON_MULTIPLY_BF16(176, 88, 88, 89, 90)
PHOTON_MULTIPLY_BF16(192, 96, 96, 97, 98)

PHOTON_MULTIPLY_E4M3(32, 16, 16, 17, 18)
PHOTON_MULTIPLY_E4M3(64, 32, 32, 33, 34)
PHOTON_MULTIPLY_E4M3(80, 40, 40, 41, 42)
PHOTON_MULTIPLY_E4M3(96, 48, 48, 49, 50)
PHOTON_MULTIPLY_E4M3(128, 64, 64, 65, 66)
PHOTON_MULTIPLY_E4M3(152, 76, 76, 77, 78)
PHOTON_MULTIPLY_E4M3(160, 80, 80, 81, 82)
PHOTON_MULTIPLY_E4M3(192, 96, 96, 97, 98)

template <int kRegisters>
__device__ inline void multiply_rows(float (&d)[kRegisters], const RowTileFragment& x,
                                     const RowTileFragment& w, int depth, bool adds) {
  multiply_rows(d, describe_row_tiles<kKBlockBytes>(x, depth),
                describe_row_tiles<kKBlockBytes>(w, depth), adds);
}

// The same of e4m3 bytes: d[64][rows] = or += x[64][32] w[rows][32].
template <int kRegisters>
__device__ inline void multiply_e4m3_rows(float (&d)[kRegisters], const RowTileFragment& x,
                                          const RowTileFragment& w, int depth, bool adds) {
  multiply_e4m3_rows(d, describe_row_tiles<kKBlockBytes>(x, depth),
                     describe_row_tiles<kKBlockBytes>(w, depth), adds);
}

// Of values in shared memory, as attention adds them: d[64][columns] += a[64][16] b[16][columns], a
// in registers as multiply_bf16() takes it, b 16 rows of the first slice of 64 columns. Its eights
// of rows follow each other, and its slices are kSliceStride bytes apart.
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
                                       const RowTileFragment& b) {
  RowTileFragment slices = b;
  slices.at += (kSliceStride / 16 - 1) << 16;  // in the place of kUnusedStride
  multiply_values(d, a, describe_row_tiles<kKBlockBytes>(slices, 0));
}

// A weight in registers, as multiply_bf16() and multiply_f16() take their left operand, by tokens
// in shared memory: d[64][tokens] = or += a[64][16] x[tokens][16]. `x` is as for multiply_rows().
#define PHOTON_MULTIPLY_TOKENS(type, tokens, registers, a_numbers, x_number, adds_number)      \
  __device__ inline void multiply_tokens_##type(float (&d)[registers], const uint32_t (&a)[4], \
                                                uint64_t x, bool adds) {                       \
    asm volatile(                                                                              \
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #adds_number                                \
        ", 0;\nwgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." #type "." #type           \
        " {" PHOTON_NAMES_##registers "}, {" a_numbers "}, %" #x_number ", adds, 1, 1, 0;\n}"  \
        : PHOTON_SUMS_##registers                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(static_cast<int>(adds)));    \
  }

PHOTON_MULTIPLY_TOKENS(bf16, 32, 16, "%16,%17,%18,%19", 20, 21)
PHOTON_MULTIPLY_TOKENS(f16, 32, 16, "%16,%17,%18,%19", 20, 21)

// `kIsF16`: of float16, else bfloat16.
template <bool kIsF16, int kRegisters>
__device__ inline void multiply_tokens(float (&d)[kRegisters], const uint32_t (&a)[4],
                                       const RowTileFragment& x, int depth, bool adds) {
  const uint64_t described = describe_row_tiles<kKBlockBytes>(x, depth);
  if constexpr (kIsF16) {
    multiply_tokens_f16(d, a, described, adds);
  } else {
    multiply_tokens_bf16(d, a, described, adds);
  }
}

// Operands in registers: not computed behind warpgroup_begin(), nor overwritten ahead of a wait.
template <int kRows>
__device__ inline void warpgroup_settle(uint32_t (&a)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

#else

__device__ inline void warpgroup_commit() {}
template <int kPending>
__device__ inline void warpgroup_wait_but() {
  __syncwarp();
}
template <int kRegisters>
__device__ inline void warpgroup_settle(float (&)[kRegisters]) {}

// Of the group's tokens, of each eight rows n and their four sums: `multiply(sums, tokens, rows)`,
// of 32 bytes of each.
template <int kRegisters, typename Multiply>
__device__ inline void for_each_eight(float (&d)[kRegisters], const RowTileFragment& x,
                                      const RowTileFragment& w, int depth, bool adds,
                                      const Multiply& multiply) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8, row = lane % 8;
  uint32_t tokens[4];
  load_matrices(tokens, swizzled_vector(x.at + (2 * warp + matrix % 2) * kKBlockBytes, row, depth,
                                        matrix / 2));
#pragma unroll
  for (int n = 0; n < kRegisters / 4; ++n) {
    uint32_t rows[4];  // the last two are not used
    load_matrices(rows, swizzled_vector(w.at + n * kKBlockBytes, row, depth, matrix % 2));
    float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[n * 4]);
    if (!adds) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    multiply(sums, tokens, rows);
  }
}

template <int kRegisters>
__device__ inline void multiply_rows(float (&d)[kRegisters], const RowTileFragment& x,
                                     const RowTileFragment& w, int depth, bool adds) {
  for_each_eight(d, x, w, depth, adds,
                 [](float (&sums)[4], const uint32_t (&tokens)[4], const uint32_t (&rows)[4]) {
                   multiply_bf16(sums, tokens, {rows[0], rows[1]});
                 });
}

// As float16, which has them all: first the even pairs of columns, then the odd ones.
template <int kRegisters>
__device__ inline void multiply_e4m3_rows(float (&d)[kRegisters], const RowTileFragment& x,
                                          const RowTileFragment& w, int depth, bool adds) {
  for_each_eight(d, x, w, depth, adds,
                 [](float (&sums)[4], const uint32_t (&tokens)[4], const uint32_t (&rows)[4]) {
                   uint32_t x_pairs[4][2], w_pairs[2][2];
                   for (int i = 0; i < 4; ++i) halves_of_e4m3(x_pairs[i], tokens[i]);
                   for (int i = 0; i < 2; ++i) halves_of_e4m3(w_pairs[i], rows[i]);
                   for (int i = 0; i < 2; ++i)
                     multiply_f16(sums,
                                  {x_pairs[0][i], x_pairs[1][i], x_pairs[2][i], x_pairs[3][i]},
                                  {w_pairs[0][i], w_pairs[1][i]});
                 });
}

template <int kSliceStride, int kRegisters>
__device__ inline void multiply_values(float (&d)[kRegisters], const uint32_t (&a)[4],
                                       const RowTileFragment& b) {
  const int lane = threadIdx.x % 32, row = lane % 8, row_tile = lane / 8 % 2, vector = lane / 16;
#pragma unroll
  for (int n = 0; n < kRegisters / 4; n += 2) {
    uint32_t rows[4];
    load_matrices_transposed(
        rows, swizzled_vector(b.at + n / 8 * kSliceStride + row_tile * kKBlockBytes, row, n % 8 / 2,
                              vector));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[(n + i) * 4]);
      multiply_bf16(sums, a, {rows[2 * i], rows[2 * i + 1]});
    }
  }
}

template <bool kIsF16, int kRegisters>
__device__ inline void multiply_tokens(float (&d)[kRegisters], const uint32_t (&a)[4],
                                       const RowTileFragment& x, int depth, bool adds) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int n = 0; n < kRegisters / 4; n += 2) {
    uint32_t columns[4];
    load_matrices(columns,
                  swizzled_vector(x.at + (n + matrix / 2) * kKBlockBytes, row, depth, matrix % 2));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&d[(n + i) * 4]);
      if (!adds) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
      const uint32_t b[] = {columns[2 * i], columns[2 * i + 1]};
      if constexpr (kIsF16) {
        multiply_f16(sums, a, b);
      } else {
        multiply_bf16(sums, a, b);
      }
    }
  }
}

template <int kRows>
__device__ inline void warpgroup_settle(uint32_t (&)[kRows][4]) {}

#endif

}  // namespace photon::cuda
