// The warps of a CTA that bring weights and x into shared memory, for those that multiply
// (mid_stored.cuh).
#pragma once
#include "cuda/linear/mid_stored_tiles.cuh"
#include "cuda/linear/ring_stage.cuh"

namespace photon::cuda::stream_linear::mid_stored {

// Groups wait for all phases of a barrier in turn. So each has a ring of x of its own, and of
// weights its own or one for two, whose K blocks share a row of 128 bytes.

// A warp: fills the rings of weights, for all passes, an M tile of a K block a stage. All its rows
// are requested, also where the CTA has fewer: those of its neighbours then come out of L2.
template <typename Size>
__device__ void copy_weights(const Params& p, const CtaWork& work, unsigned char* ring,
                             const Barriers<Size>& barriers) {
  constexpr int kBlocks = kStageBlocks<typename Size::Load>;
  const RowTileMap& weight = p.weight[work.range.part];
  const uint64_t policy = evict_first();
  Stage stages[Size::kRings];
#pragma unroll 1
  for (int tile = 0; tile < work.range.tiles; tile += p.pass_tiles * p.m_tile_tiles) {
    work.for_units([&](int first, int count) {
#pragma unroll 1
      for (int m = 0; m < p.pass_tiles; ++m) {
        const TileRows rows = tile_rows<Size::kEpilogue>(p, work.range, tile + m * p.m_tile_tiles);
#pragma unroll
        for (int i = 0; i < Size::kRings; ++i) {
          if (i * kBlocks >= count) break;
          const int column = first / kBlocks + i, place = i * p.stages + stages[i].index;
          unsigned char* const to = ring + place * p.stage_bytes;
          Barrier* const full = &barriers.weights[place];
          wait_barrier(&barriers.read[place], stages[i].parity ^ 1);
          __syncwarp();  // no lane waits for a phase that the next one has followed
          if (is_elected()) {
            arrive_expecting(full, p.stage_bytes);
            copy_row_tile(to, weight, rows.first, column, full, policy);
            if (is_swiglu<Size::kEpilogue>(p))
              copy_row_tile(to + p.stage_bytes / 2, weight, rows.second, column, full, policy);
          }
          stages[i].advance(p.stages);
        }
      }
    });
  }
}

// A warp: copies to rows of kTokens floats, 16 bytes a lane at a time, what rows of
// p.prepared.pitch floats have from `first` on.
template <int kTokens>
__device__ inline void copy_floats(const Params& p, unsigned char* to, const float* from, int first,
                                   int rows) {
  constexpr int kRowVectors = kTokens / 4;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < rows * kRowVectors; i += kWarpSize) {
    const int row = i / kRowVectors, column = first + i % kRowVectors * 4;
    if (column < p.prepared.pitch)
      async_copy16(to + i * 16, from + row * p.prepared.pitch + column, true);
  }
}

// A warp: fills the rings of x, 32 tokens of a K block a stage, with what comes with it.
template <typename Size>
__device__ void copy_x(const Params& p, const CtaWork& work, const Layout<Size>& at,
                       unsigned char* shared, const Barriers<Size>& barriers) {
  constexpr int kRows = Size::Load::kXRows, kStages = kXStages / kGroups;
  const uint64_t policy = evict_last();
  if constexpr (!Size::kAdds) {
    copy_floats<Size::kTokens>(p, shared + at.squares, p.prepared.squares, 0, kKBlocks);
    arrive_when_copied(barriers.squared);
  }
  Stage stages[kGroups];
#pragma unroll 1
  for (int tile = 0; tile < work.range.tiles; tile += p.pass_tiles * p.m_tile_tiles) {
    work.for_units([&](int first, int count) {
#pragma unroll 1
      for (int half = 0; half < Size::kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          if (i >= count) break;
          const int block = work.range.column / kBlockColumns + first + i,
                    place = i * kStages + stages[i].index;
          Barrier* const landed = &barriers.x[place];
          wait_barrier(&barriers.x_read[place], stages[i].parity ^ 1);
          copy_floats<kTokensAtOnce>(
              p, shared + at.of_x + place * kRows * kTokensAtOnce * 4,
              p.prepared.of_x + static_cast<int64_t>(block) * kRows * p.prepared.pitch,
              half * kTokensAtOnce, kRows);
          arrive_when_copied(landed);
          if (is_elected()) {
            arrive_expecting(landed, Size::kXBytes);
            copy_row_tile(shared + at.x + place * Size::kXBytes, p.tokens_map, half * kTokensAtOnce,
                          block * (kBlockColumns / kKBlockColumns), landed, policy);
          }
          stages[i].advance(kStages);
        }
      }
    });
  }
}

}  // namespace photon::cuda::stream_linear::mid_stored
