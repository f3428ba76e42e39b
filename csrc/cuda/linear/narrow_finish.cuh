// The end of a pass of the narrow linears (narrow_linear.cuh): the warps' sums become outputs.
#pragma once
#include "cuda/linear/narrow_ring.cuh"

namespace photon::cuda::stream_linear::narrow {

template <typename Size, bool kNormalizes>
struct Multiplier;

// The warps' sums are added up in a fixed order.
template <typename Size, Epilogue kEpilogue>
struct Finish {
  static constexpr bool kNormalizes = kEpilogue != Epilogue::kAdd;

  static constexpr int kTokens = Size::kTokens;

  const Params& p;
  const Layout<Size>& at;
  unsigned char* shared;
  int tiles, active;  // tiles of the CTA's range, tokens that live
  int partial_bytes;

  template <typename T>
  __device__ T* place(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  // All threads must call it. The sums are added up in rounds of as many tiles as there is room
  // for. Where few tokens live, a tile takes less room; and in the last pass the ring is free,
  // which has room for many tiles.
  __device__ void run(const Multiplier<Size, kNormalizes>& warp, const Pass& pass,
                      const Output<kEpilogue>& output) const {
    const int most_bits = kTokens <= kTokenTile || active <= kTokenTile ? 3 : 4;
    const int column_bits = active <= 1 ? 0 : active <= 2 ? 1 : active <= 4 ? 2 : most_bits;
    const int slot = kWarps * kPartialPitch << column_bits;
    const bool uses_ring =
        pass.count * slot * 4 > partial_bytes && pass.first + pass.count == tiles;
    float* const partials = place<float>(uses_ring ? at.ring : at.partial);
    const int at_once =
        (uses_ring ? p.stages * p.stage_bytes : partial_bytes) / kSlotBytes >> column_bits;
    const unsigned g = threadIdx.x % kRowTileRows, tokens = 1u << column_bits;
    if (pass.first > 0 || uses_ring)
      __syncthreads();  // all have read what the pass before left, and the ring
    if (kNormalizes && warp.group / 2 == warp.thread) {
      float* const squares = place<float>(at.squares) + warp.warp * kTokens + warp.group;
#pragma unroll
      for (int t = 0; t < Size::kTokenTiles; ++t)
        squares[t * kTokenTile] =
            warp.group % 2 == 0 ? warp.prepared.squares[t][0] : warp.prepared.squares[t][1];
    }
#pragma unroll 1
    for (int first = 0; first < pass.count; first += at_once) {
      const int count = min(at_once, pass.count - first);
      if (first > 0) __syncthreads();  // the round before has been read
      put_partials(warp, partials, column_bits, first, count);
      if (kEpilogue == Epilogue::kAdd && first == 0) wait_copies<0>();
      __syncthreads();
#pragma unroll 1
      for (unsigned i = threadIdx.x / kRowTileRows; i < count * tokens;
           i += kThreads / kRowTileRows) {
        const int token = i & (tokens - 1), tile = i >> column_bits;
        if (token >= active) continue;
        const float* partial = partials + tile * slot + token * kPartialPitch + g;
        const auto sum = [&](int w, int row) {
          return partial[(w * kPartialPitch << column_bits) + row];
        };
        output.take(first + tile, g, token, output.scale(token), add_up(sum, 0),
                    add_up(sum, kRowTileRows));
      }
    }
  }

 private:
  // sum(warp, row), in the order of the warps; of fewer bits those of two warps four apart are
  // added before, as a group of mid_stored.cuh has them.
  template <typename Sum>
  __device__ static float add_up(const Sum& sum, int row) {
    constexpr int kSums = Size::Load::kIsScaled ? kWarps / 2 : kWarps;
    const auto next = [&](int w) {
      return kSums < kWarps ? sum(w, row) + sum(w + kSums, row) : sum(w, row);
    };
    float all = next(0);
#pragma unroll
    for (int w = 1; w < kSums; ++w) all += next(w);
    return all;
  }

  // This warp's tiles first .. first + count - 1.
  __device__ void put_partials(const Multiplier<Size, kNormalizes>& warp, float* partials,
                               int column_bits, int first, int count) const {
    float* slots = partials + (warp.warp * kPartialPitch << column_bits) + warp.group;
#pragma unroll
    for (int m = 0; m < Size::kTiles; ++m) {
      if (m < first || m >= first + count) continue;
      float* slot = slots + ((m - first) * kWarps * kPartialPitch << column_bits);
#pragma unroll
      for (int j = 0; j < 2 * Size::kTokenTiles; ++j) {
        const int column = j / 2 * kTokenTile + 2 * warp.thread + j % 2;
        if (column >= 1 << column_bits) continue;
        slot[column * kPartialPitch] = warp.sums[m][j / 2][j % 2];
        slot[column * kPartialPitch + kRowTileRows] = warp.sums[m][j / 2][j % 2 + 2];
      }
    }
  }
};

}  // namespace photon::cuda::stream_linear::narrow
