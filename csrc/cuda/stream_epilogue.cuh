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
  int thread, active;  // active: lines

  template <typename T>
  __device__ T* place(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  __device__ int rank() const { return blockIdx.x & (p.split - 1); }

  // Requests the old residuals of the pass; run() waits for them.
  __device__ void fetch_residual(const Pass& pass) const {
#pragma unroll 1
    for (int i = thread; i < pass.tiles * kLines * 2; i += kThreads) {
      const int half = i % 2, line = i / 2 % kLines, m = i / 2 / kLines;
      const int output = output_of<kEpilogue>(p, share, pass.first + m, half * kPanelRows);
      if (output < 0 || line >= active) continue;
      async_copy16(place<uint4>(at.residual) + (m * kLines + line) * 2 + half, p.out + line * p.out_stride + output, true);
    }
    commit_copies();
  }

  // From the warps' sums to outputs; all threads together. With a split, rank 0's outputs wait for finish_split(). The sums meet in rounds
  // of as many fragments (a tile of 16 rows by eight lines) as there is room for; where few lines live, a fragment has fewer columns.
  __device__ void run(const Multiplier<Size, kNormalizes>& warp, const Pass& pass) const {
    const int column_bits = active <= 1 ? 0 : active <= 2 ? 1 : active <= 4 ? 2 : 3;
    const int slot = kWarps * kPartialPitch << column_bits, at_once = kPartialBytes / 4 / (kWarps * kPartialPitch) >> column_bits;
    const int fragments = pass.tiles * kLineTiles;
    if constexpr (kNormalizes) put_squares(warp);
#pragma unroll 1
    for (int first = 0; first < fragments; first += at_once) {
      const int count = min(at_once, fragments - first);
      __syncthreads();  // the buffer's last readers are done
      put_partials(warp, column_bits, first, count);
      if (kNormalizes && first == 0) put_scale();
      if (kEpilogue == Epilogue::kResidual && first == 0) wait_copies<0>();
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < count * kPanelRows << column_bits; i += kThreads) {
        const int g = i % kPanelRows, column = i / kPanelRows & ((1 << column_bits) - 1), fragment = i / kPanelRows >> column_bits;
        const int m = (first + fragment) / kLineTiles, line = (first + fragment) % kLineTiles * kLineTile + column;
        if (line >= active) continue;
        const float* partial = place<float>(at.partial) + fragment * slot + column * kPartialPitch + g;
        float low = partial[0], high = partial[kPanelRows];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          low += partial[w * kPartialPitch << column_bits];
          high += partial[(w * kPartialPitch << column_bits) + kPanelRows];
        }
        if (p.split == 1) {
          emit(pass, m, g, line, low, high);
        } else {
          hand_over(m, g, line, low, high);
        }
      }
    }
  }

  // After the cluster's barrier: rank 0 adds what the other block handed over.
  __device__ void finish_split(const Pass& pass) const {
    if (rank() != 0) return;
#pragma unroll 1
    for (int i = thread; i < pass.tiles * kLines * kPanelRows; i += kThreads) {
      const int g = i % kPanelRows, line = i / kPanelRows % kLines, m = i / kPanelRows / kLines;
      if (line >= active) continue;
      const float *own = place<float>(at.own) + exchange_index(m, g, line), *peer = place<float>(at.peer) + exchange_index(m, g, line);
      emit(pass, m, g, line, own[0] + peer[0], own[1] + peer[1]);
    }
  }

 private:
  __device__ int exchange_index(int m, int g, int line) const { return ((m * kLines + line) * kPanelRows + g) * 2; }

  __device__ void hand_over(int m, int g, int line, float low, float high) const {
    if (rank() == 0) {
      float* sum = place<float>(at.own) + exchange_index(m, g, line);
      sum[0] = low;
      sum[1] = high;
    } else {
      float* sum = place<float>(at.peer) + exchange_index(m, g, line);
      store_in_block(sum, 0, low);
      store_in_block(sum + 1, 0, high);
    }
  }

  __device__ void put_squares(const Multiplier<Size, kNormalizes>& warp) const {
    if (warp.group / 2 != warp.thread) return;
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      place<float>(at.squares)[warp.warp * kLines + n * kLineTile + warp.group] = warp.group % 2 == 0 ? warp.squares[n][0] : warp.squares[n][1];
    }
  }

  // One over the root mean square of each line.
  __device__ void put_scale() const {
    if (thread >= active) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += place<float>(at.squares)[w * kLines + thread];
    place<float>(at.scale)[thread] = 1.0f / sqrtf(sum / static_cast<float>(p.k) + p.eps);
  }

  // This warp's fragments first .. first + count - 1, as far as they have lines.
  __device__ void put_partials(const Multiplier<Size, kNormalizes>& warp, int column_bits, int first, int count) const {
    const int columns = 1 << column_bits;
    float* slots = place<float>(at.partial) + (warp.warp * kPartialPitch << column_bits) + panel_row(warp.group);
#pragma unroll
    for (int f = 0; f < kTiles * kLineTiles; ++f) {
      if (f < first || f >= first + count || f % kLineTiles * kLineTile >= active) continue;
      float* slot = slots + ((f - first) * kWarps * kPartialPitch << column_bits);
      const float(&sums)[4] = warp.sums[f / kLineTiles][f % kLineTiles];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 2 * warp.thread + j;
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
      const float scale = place<float>(at.scale)[line];
      low *= scale;
      high *= scale;
    }
    Bf16* out = p.out + line * p.out_stride;
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
