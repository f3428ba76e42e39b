// The end of a pass of stream_linear: the warps' partial sums meet, in a fixed order, and become outputs.
#pragma once
#include "cuda/stream_linear.cuh"

namespace photon::cuda::stream_linear {

template <typename Size, Epilogue kEpilogue, bool kNormalizes>
struct Finish {
  static constexpr int kLineTiles = Size::kLineTiles, kTiles = Size::kTiles, kLines = Size::kLines;

  const Params& p;
  const Share& share;
  const SharedLayout& at;
  unsigned char* shared;
  Barrier* arrived;    // what the cluster's other part of the columns has sent is there
  int thread, active;  // active: lines of the block

  template <typename T>
  __device__ T* place(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  // Requests the old residuals of the pass; run() waits for them.
  __device__ void fetch_residual(const Pass& pass) const {
#pragma unroll 1
    for (int i = thread; i < pass.tiles * kLines * 2; i += kThreads) {
      const int half = i % 2, line = i / 2 % kLines, m = i / 2 / kLines;
      const int output = output_of<kEpilogue>(p, share, pass.first + m, half * kPanelRows);
      if (output < 0 || line >= active) continue;
      async_copy16(place<uint4>(at.residual) + (m * kLines + line) * 2 + half,
                   p.out + static_cast<int64_t>(share.first_line + line) * p.out_stride + output, true);
    }
    commit_copies();
  }

  // From the warps' sums to outputs; all threads together. The sums meet in rounds of as many fragments (a tile of 16 rows by eight lines)
  // as there is room for; where few lines live, a fragment has fewer columns. After the last pass the ring is free and has room for many.
  __device__ void run(const Multiplier<Size, kNormalizes>& warp, const Pass& pass) const {
    const int column_bits = active <= 1 ? 0 : active <= 2 ? 1 : active <= 4 ? 2 : 3;
    const int slot = kWarps * kPartialPitch << column_bits, fragments = pass.tiles * kLineTiles;
    const bool uses_ring = fragments * slot * 4 > kPartialBytes && pass.first + pass.tiles == share.tiles;
    float* const partials = place<float>(uses_ring ? at.ring : at.partial);
    const int at_once = (uses_ring ? p.stages * p.stage_bytes : kPartialBytes) / 4 / slot;
    if (pass.first > 0 || uses_ring) __syncthreads();  // what the pass before left has been read; and the ring
    if constexpr (kNormalizes) put_squares(warp);
#pragma unroll 1
    for (int first = 0; first < fragments; first += at_once) {
      const int count = min(at_once, fragments - first);
      if (first > 0) __syncthreads();  // the round before has been read
      put_partials(warp, partials, column_bits, first, count);
      if (kEpilogue == Epilogue::kResidual && first == 0) wait_copies<0>();
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < count * kPanelRows << column_bits; i += kThreads) {
        const int g = i % kPanelRows, column = i / kPanelRows & ((1 << column_bits) - 1), fragment = i / kPanelRows >> column_bits;
        const int m = (first + fragment) / kLineTiles, line = (first + fragment) % kLineTiles * kLineTile + column;
        if (line >= active) continue;
        const float* partial = partials + fragment * slot + column * kPartialPitch + g;
        float low = partial[0], high = partial[kPanelRows];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          low += partial[w * kPartialPitch << column_bits];
          high += partial[(w * kPartialPitch << column_bits) + kPanelRows];
        }
        settle(pass, m, g, line, low, high);
      }
    }
  }

 private:
  // Without a split, these are the sums. With one, the block of the second part sends its own to that of the first, which adds them. All
  // passes' are one phase of the barrier: the first part's first pass waits for the second part's last, which waits for nobody.
  __device__ void settle(const Pass& pass, int m, int g, int line, float low, float high) const {
    if (p.split > 1) {
      float* peer = place<float>(at.peer) + (((pass.first + m) * kLines + line) * kPanelRows + g) * 2;
      if (share.part > 0) return send_to_block(peer, share.group, low, high, arrived);
      wait_barrier(arrived, 0);
      low += peer[0];
      high += peer[1];
    }
    emit(pass, m, g, line, low, high);
  }

  __device__ void put_squares(const Multiplier<Size, kNormalizes>& warp) const {
    if (warp.group / 2 != warp.thread) return;
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      place<float>(at.squares)[warp.warp * kLines + n * kLineTile + warp.line_of(warp.group)] =
          warp.group % 2 == 0 ? warp.squares[n][0] : warp.squares[n][1];
    }
  }

  // One over the root mean square of a line.
  __device__ float scale(int line) const {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += place<float>(at.squares)[w * kLines + line];
    return rsqrtf(fmaf(sum, p.per_column, p.eps));
  }

  // This warp's fragments first .. first + count - 1, as far as they have lines.
  __device__ void put_partials(const Multiplier<Size, kNormalizes>& warp, float* partials, int column_bits, int first, int count) const {
    const int columns = 1 << column_bits;
    float* slots = partials + (warp.warp * kPartialPitch << column_bits) + panel_row(warp.group);
#pragma unroll
    for (int f = 0; f < kTiles * kLineTiles; ++f) {
      if (f < first || f >= first + count || f % kLineTiles * kLineTile >= active) continue;
      float* slot = slots + ((f - first) * kWarps * kPartialPitch << column_bits);
      const float (&sums)[4] = warp.sums[f / kLineTiles][f % kLineTiles];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = warp.line_of(2 * warp.thread + j);
        if (column >= columns) continue;
        slot[column * kPartialPitch] = sums[j];
        slot[column * kPartialPitch + kPanelRows] = sums[j + 2];
      }
    }
  }

  __device__ float bias(int row) const { return p.bias != nullptr ? to_float(p.bias[row]) : 0.0f; }

  // Two rows of a tile, g and g + 8, of one line.
  __device__ void emit(const Pass& pass, int m, int g, int line, float low, float high) const {
    if constexpr (kNormalizes) {
      const float by = scale(line);
      low *= by;
      high *= by;
    }
    Bf16* out = p.out + static_cast<int64_t>(share.first_line + line) * p.out_stride;
    const int first = output_of<kEpilogue>(p, share, pass.first + m, g);
    if constexpr (kEpilogue == Epilogue::kSwiglu) {
      if (first >= 0) out[first] = silu_times<Bf16>(rounded<Bf16>(low + bias(first)), rounded<Bf16>(high + bias(p.n + first)));
    } else {
      const int second = output_of<kEpilogue>(p, share, pass.first + m, g + kPanelRows);
      const Bf16* old = place<Bf16>(at.residual) + (m * kLines + line) * kTileRows + g;
      if (first >= 0) out[first] = finished(low + bias(first), old);
      if (second >= 0) out[second] = finished(high + bias(second), old + kPanelRows);
    }
  }

  __device__ Bf16 finished(float v, const Bf16* old) const {
    if constexpr (kEpilogue == Epilogue::kResidual) v = to_float(*old) + rounded<Bf16>(v);
    return from_float<Bf16>(v);
  }
};

}  // namespace photon::cuda::stream_linear
