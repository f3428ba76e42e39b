// A weight of fewer bits in the linears of a batch (batch_linear.cuh): one or two more warp groups
// decode its rows into the ring from which the others multiply.
//
// Tensor copies bring 128 bytes of each row of a tile into a ring of their own, as they lie in
// memory. The groups turn them into K blocks of bfloat16, each number scaled and rounded once, as
// dequantize_into does. So all else is as for a dense weight of these numbers.
#pragma once
#include "cuda/linear/batch_decoder.cuh"
#include "cuda/linear/batch_linear.cuh"

namespace photon::cuda::batch {

// Of warps that decode; each has K blocks of its own.
template <int kBlocks, int kRows>
constexpr int kDecodingGroups = kBlocks == 2 && kRows > 128 ? 1 : 2;

// Groups decode K blocks by turns. One more warp brings the rows as they are stored, and one brings
// x.
template <int kBlocks, int kRows, Finish kFinish>
struct StoredFeed {
  using Params = StoredParams;
  using R = Rings<kBlocks, kRows>;
  static constexpr int kGroups = kDecodingGroups<kBlocks, kRows>;
  static constexpr int kThreads = kGroups * kWarpgroupThreads + 2 * kWarpSize;
  static constexpr int kFillers = kGroupWarps;
  static constexpr int kStageBytes = kRows * kBatchRowBytes;

  // Of a thread, at first and then.
  static constexpr bool kIsWide = kBlocks + kGroups > 3;  // more than 16 warps
  static constexpr int kRegisters = kIsWide ? 96 : 128;
  static constexpr int kSumRegisters = kIsWide ? 120 : kBlocks == 2 ? 144 : 160;
  static constexpr int kDecodingRegisters = kIsWide ? 72 : kBlocks == 2 ? 96 : 112;
  static_assert(kBlocks * kSumRegisters + kGroups * kDecodingRegisters ==
                (kBlocks + kGroups) * kRegisters);

  const StoredParams& p;
  const Tile& tile;
  unsigned char* const stored;
  const R rings;
  Barrier *const landed, *const read;  // by stage: rows as they are stored have landed, are read

  __device__ StoredFeed(const StoredParams& p, const Tile& tile, unsigned char* shared)
      : p(p),
        tile(tile),
        stored(shared),
        rings(p, shared + p.stored_stages * kStageBytes),
        landed(rings.empty + kBatchMaxStages),
        read(landed + kBatchMaxStages) {}

  __device__ void init() const {
    if (threadIdx.x >= kBatchMaxStages) return;
    init_barrier(&landed[threadIdx.x], 1);
    init_barrier(&read[threadIdx.x], kGroups * kGroupWarps);
  }

  __device__ void begin_multiplying() const { grow_registers<kSumRegisters>(); }
  __device__ void multiply(int group, float (&sums)[kRows / 2]) const {
    batch::multiply(p, tile, rings, group, sums);
  }

  // The warps that do not multiply; `group`: of four of them.
  __device__ void run(int group) const {
    if (group == kGroups) {
      if (threadIdx.x / kWarpSize % kGroupWarps == 0) {
        copy_stored();
      } else {
        copy_tokens();
      }
    } else {
      shrink_registers<kDecodingRegisters>();
      if (p.format == WeightFormat::kFp8) {
        decode<Fp8Codes>(group);
      } else if (p.format == WeightFormat::kInt8) {
        decode<Int8Codes>(group);
      } else if (p.scales.offsets != nullptr) {
        decode<Int4OffsetCodes>(group);
      } else {
        decode<Int4Codes>(group);
      }
    }
    wait_for_earlier();
  }

 private:
  template <typename Codes>
  __device__ void decode(int group) const {
    using D = Decoder<Codes, kRows, kFinish>;
    constexpr int kStageBlocks = D::kStageBlocks;
    const bool is_first = threadIdx.x % kWarpSize == 0;
    D decoder(p, tile, tile.first_step + group);
    Stage from, to;
    for (int i = 0; i < group; ++i) to.advance(p.weight_stages);
#pragma unroll 1
    for (int step = group; step < tile.steps; step += kGroups) {
      if (step % kStageBlocks < kGroups) wait_barrier(&landed[from.index], from.parity);
      const int freed = step - p.weight_stages;
      if (freed >= 0)
        wait_barrier(&rings.empty[freed % kBatchMaxStages], freed / kBatchMaxStages % 2);
      decoder.decode(stored + from.index * kStageBytes, step % kStageBlocks,
                     rings.weight + to.index * R::kWeightBytes,
                     tile.first_step + min(step + kGroups, tile.steps - 1));
      fence_async_shared();
      __syncwarp();
      if (is_first) arrive(&rings.weight_full[to.index]);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) to.advance(p.weight_stages);
      if (step % kStageBlocks < kStageBlocks - kGroups) continue;
      if (is_first) arrive(&read[from.index]);
      from.advance(p.stored_stages);
    }
  }

  // A warp. At once: no kernel before this one writes weights.
  __device__ void copy_stored() const {
    const uint64_t policy = evict_first();
    const int stages = tile.steps / p.unit, first = tile.first_step / p.unit;
    Stage to;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      wait_barrier(&read[to.index], to.parity ^ 1);
      if (is_elected()) {
        arrive_expecting(&landed[to.index], kStageBytes);
        tensor_copy(stored + to.index * kStageBytes, &p.weight.map,
                    place_of_rows<kRows, kFinish>(tile.row_tile, first + i), &landed[to.index],
                    policy);
      }
      __syncwarp();
      to.advance(p.stored_stages);
    }
  }

  // A warp.
  __device__ void copy_tokens() const {
    const uint64_t policy = evict_last();
    Stage to;
    wait_for_earlier();
    fence_async_global();
#pragma unroll 1
    for (int i = 0; i < tile.steps; ++i) {
      const int freed = i - p.x_stages;
      if (freed >= 0)
        wait_barrier(&rings.empty[freed % kBatchMaxStages], freed / kBatchMaxStages % 2);
      if (is_elected()) rings.copy_tokens(p, tile, i, to.index, policy);
      __syncwarp();
      to.advance(p.x_stages);
    }
  }
};

}  // namespace photon::cuda::batch
