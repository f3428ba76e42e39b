// A weight in fp8 by tokens in fp8 in the linears of a batch (batch_linear.cuh): the matrix
// instructions take both as they lie in memory, and a stage is 128 columns.
//
// Those instructions keep fewer bits of a sum than float32 has. So a K block is summed from zero
// and then added, in float32, to the sum of those before it: where blocks of the weight have
// scales, by a fused multiply-add. The scales of a token and of a row multiply the whole sum.
#pragma once
#include "common/weight.h"
#include "cuda/linear/batch_copies.cuh"

namespace photon::cuda::batch {

constexpr int kFp8Columns = kBatchRowBytes;  // of a K block
static_assert(kFp8Columns == kScaleBlock);

struct Fp8Params : Params {
  const float* x_scales;      // [tokens]
  const float* row_scales;    // [rows of the weight], or null
  const float* block_scales;  // [blocks of 128 rows, K blocks], or null
};

// The scales of a K block that a tile's rows have, by eights of rows. Rows that follow each other
// in the weight are of two blocks at most: those of an output, or of gate and of up.
template <int kRows, Finish kFinish>
struct BlockScales {
  static constexpr bool kPairs = kFinish == Finish::kSwiglu;
  static constexpr int kKinds = kPairs ? 2 : 1;  // of rows, that lie side by side in a lane's sums
  static constexpr int kEight = kOutputs<8, kFinish>;  // rows of a kind in an eight
  // A tile of 160 rows begins 0, 32, 64 or 96 rows behind a block's first.
  static constexpr int kTileRows = kOutputs<kRows, kFinish>;
  static_assert(kScaleBlock % kEight == 0);
  static_assert(kTileRows <= kScaleBlock || kTileRows % kScaleBlock == 32);

  const float* scales;
  int first[kKinds], next[kKinds];  // places of the K block in the one and the other block's scales
  int border[kKinds];               // the first eight of rows of the other block

  __device__ BlockScales(const Fp8Params& p, const Tile& tile) : scales(p.block_scales) {
    const int row_tile = tile.row_tile * kOutputs<kRows, kFinish>;
    const int last = (kKinds * p.n - 1) / kFp8Columns;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
      const int row = row_tile + kind * p.n, block = row / kFp8Columns;
      first[kind] = block * p.steps + tile.first_step;
      next[kind] = min(block + 1, last) * p.steps + tile.first_step;
      border[kind] = (kFp8Columns - row % kFp8Columns) / kEight;
    }
  }

  // sums += partial * scales of K block `step` of the part; `partial`: of the rows from `begin` on,
  // in sums.
  template <int kPartial>
  __device__ void add(float (&sums)[kRows / 2], const float (&partial)[kPartial], int begin,
                      int step) const {
    float low[kKinds], high[kKinds];
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
      low[kind] = scales[first[kind] + step];
      high[kind] = scales[next[kind] + step];
    }
#pragma unroll
    for (int i = 0; i < kPartial; ++i) {
      const int kind = i % kKinds, eight = (begin + i) / 4;
      float& sum = sums[begin + i];
      sum = fmaf(partial[i], eight < border[kind] ? low[kind] : high[kind], sum);
    }
  }
};

// Multiplies a warp group's tokens. Of SwiGLU's rows a lane has gate and up side by side.
template <int kBlocks, int kRows, Finish kFinish>
struct Fp8Feed : CopyFeed<kBlocks, kRows, kFinish> {
  using Params = Fp8Params;
  using Base = CopyFeed<kBlocks, kRows, kFinish>;
  using Sums = float[kRows / 2];

  // Registers of a thread, at first. A thread has two sums of each of its outputs; of 128 rows by
  // 64 tokens it has the second ones by halves, so that an SM holds a CTA of the next kernel
  // besides. Where both groups need more than there are for three, that which copies gives some of
  // its own.
  static constexpr int kParts = kBlocks == 1 && kRows == 128 ? 2 : 1;
  static constexpr bool kGrows = kBlocks == 2 && kRows > 128;
  static constexpr int kRegisters = kGrows         ? 168
                                    : kRows > 160  ? 224
                                    : kRows > 128  ? 200
                                    : kRows < 128  ? 128
                                    : kBlocks == 1 ? 128
                                                   : 168;
  static constexpr int kSumRegisters = 232, kCopyRegisters = 40;
  static_assert(2 * kSumRegisters + kCopyRegisters == 3 * 168);
  static constexpr int kThreads = kGrows ? kWarpgroupThreads : kWarpSize;

  const Fp8Params& own;

  __device__ Fp8Feed(const Fp8Params& p, const Tile& tile, unsigned char* shared)
      : Base(p, tile, shared), own(p) {}

  __device__ void begin_multiplying() const {
    if constexpr (kGrows) grow_registers<kSumRegisters>();
  }

  __device__ void run(int group) const {
    if constexpr (kGrows) {
      shrink_registers<kCopyRegisters>();
      if (threadIdx.x % kWarpgroupThreads >= kWarpSize) return wait_for_earlier();
    }
    Base::run(group);
  }

  __device__ void multiply(int group, Sums& sums) const {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (own.block_scales != nullptr) {
      const BlockScales<kRows, kFinish> scales(own, this->tile);
      add_products(group, [&](const Partial& partial, int begin, int step) {
        scales.add(sums, partial, begin, step);
      });
    } else {
      add_products(group, [&](const Partial& partial, int begin, int) {
#pragma unroll
        for (int i = 0; i < kRows / 2 / kParts; ++i) sums[begin + i] += partial[i];
      });
    }
    scale(group, sums);
  }

 private:
  using Partial = float[kRows / 2 / kParts];

  // `add(partial, begin, step)`: the products of a K block by the rows from `begin` on, in sums.
  template <typename Add>
  __device__ void add_products(int group, const Add& add) const {
    using R = typename Base::R;
    const RowTileFragment x(this->rings.x + group * kBatchBlockTokens * kBatchRowBytes),
        rows(this->rings.weight);
    const bool is_first = threadIdx.x % kWarpSize == 0;
    const int steps = this->tile.steps;
    Partial partial;
    Stage x_at, weight_at;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_barrier(&this->rings.weight_full[weight_at.index], weight_at.parity);
      wait_barrier(&this->rings.x_full[x_at.index], x_at.parity);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int first = weight_at.index * R::kWeightBytes + part * R::kWeightBytes / kParts;
        warpgroup_begin();
#pragma unroll
        for (int depth = 0; depth < kFp8Columns / 32; ++depth)
          multiply_e4m3_rows(partial, x.after(x_at.index * R::kXBytes), rows.after(first), depth,
                             depth > 0);
        warpgroup_commit();
        warpgroup_wait_but<0>();
        warpgroup_settle(partial);
        if (part == kParts - 1 && step + 1 < steps && is_first)
          arrive(&this->rings.empty[step % kBatchMaxStages]);
        add(partial, part * kRows / 2 / kParts, step);
      }
      x_at.advance(own.x_stages);
      weight_at.advance(own.weight_stages);
    }
  }

  // Of the tokens, which the kernel before has written, and of the rows.
  __device__ void scale(int group, Sums& sums) const {
    constexpr int kKinds = BlockScales<kRows, kFinish>::kKinds;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    const int token = this->tile.first_token + group * kBatchBlockTokens + warp * 16 + lane / 4;
    const int row_tile = this->tile.row_tile * kOutputs<kRows, kFinish>;
    wait_for_earlier();
    float tokens[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tokens[half] = __int_as_float(load_fresh(reinterpret_cast<const int32_t*>(own.x_scales) +
                                               min(token + half * 8, own.tokens - 1)));
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const int eight = i / 4, column = i % 2;
      const int row = kKinds == 2 ? row_tile + eight * 4 + lane % 4 + column * own.n
                                  : row_tile + eight * 8 + lane % 4 * 2 + column;
      float factor = tokens[i / 2 % 2];
      if (own.row_scales != nullptr) factor *= own.row_scales[min(row, kKinds * own.n - 1)];
      sums[i] *= factor;
    }
  }
};

}  // namespace photon::cuda::batch
