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

  __device__ int rank() const { return blockIdx.x % p.split; }

  // Requests the old residuals of the pass; run() waits for them.
  __device__ void fetch_residual(const Pass& pass) const {
    const int vectors = pass.tiles * 2 * active;
    for (int i = thread; i < vectors; i += kThreads) {
      const int half = i % 2, line = i / 2 % active, m = i / 2 / active;
      const int output = output_of<kEpilogue>(p, share, pass.first_tile + m, half * kPanel);
      if (output < 0) continue;
      async_copy16(place<uint4>(at.residual) + (m * kLines + line) * 2 + half, p.out + line * p.out_stride + output, true);
    }
    commit_copies();
  }

  // From the warps' sums to outputs; all threads together. With a split, rank 0's outputs wait for finish_split().
  __device__ void run(const Multiplier<Size, kNormalizes>& warp, const Pass& pass) const {
    const int line_tiles = (active + kLineTile - 1) / kLineTile, columns = active < kLineTile ? active : kLineTile;
    const int slot = kWarps * columns * kPartialPitch, fragments = pass.tiles * line_tiles;
    if (fragments == 0) return;
    if constexpr (kNormalizes) put_squares(warp);
    const int at_once = kPartialBytes / 4 / slot;
    for (int first = 0; first < fragments; first += at_once) {
      const int last = first + at_once < fragments ? first + at_once : fragments;
      __syncthreads();  // the buffer's last readers are done
      put_partials(warp, pass, line_tiles, columns, first, last);
      if (kNormalizes && first == 0) put_scale();
      if (kEpilogue == Epilogue::kResidual && first == 0) wait_copies<0>();
      __syncthreads();
      for (int i = thread; i < (last - first) * columns * kPanel; i += kThreads) {
        const int g = i % kPanel, column = i / kPanel % columns, fragment = i / kPanel / columns;
        const float* partial = place<float>(at.partial) + fragment * slot + column * kPartialPitch + g;
        float low = partial[0], high = partial[kPanel];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          low += partial[w * columns * kPartialPitch];
          high += partial[w * columns * kPartialPitch + kPanel];
        }
        const int m = (first + fragment) / line_tiles, line = (first + fragment) % line_tiles * kLineTile + column;
        if (line >= active) continue;
        if (p.split == 1) {
          emit(pass, m, g, line, low, high);
        } else {
          hand_over(m, g, line, low, high);
        }
      }
    }
  }

  // After the cluster's barrier: rank 0 adds what the others handed over, in order of rank.
  __device__ void finish_split(const Pass& pass) const {
    if (rank() != 0) return;
    for (int i = thread; i < pass.tiles * active * kPanel; i += kThreads) {
      const int g = i % kPanel, line = i / kPanel % active, m = i / kPanel / active;
      const float* sum = place<float>(at.own) + exchange_index(m, g, line);
      float low = sum[0], high = sum[1];
      for (int rank = 1; rank < p.split; ++rank) {
        sum = peer(rank) + exchange_index(m, g, line);
        low += sum[0];
        high += sum[1];
      }
      emit(pass, m, g, line, low, high);
    }
  }

 private:
  __device__ int exchange_index(int m, int g, int line) const { return ((m * kLines + line) * kPanel + g) * 2; }

  // Rank 0's place for what `rank` hands over.
  __device__ float* peer(int rank) const { return place<float>(at.peers) + (rank - 1) * kTiles * kTileRows * kLines; }

  __device__ void hand_over(int m, int g, int line, float low, float high) const {
    if (rank() == 0) {
      float* sum = place<float>(at.own) + exchange_index(m, g, line);
      sum[0] = low;
      sum[1] = high;
    } else {
      float* sum = peer(rank()) + exchange_index(m, g, line);
      store_in_block(sum, 0, low);
      store_in_block(sum + 1, 0, high);
    }
  }

  __device__ void put_squares(const Multiplier<Size, kNormalizes>& warp) const {
#pragma unroll
    for (int n = 0; n < kLineTiles; ++n) {
      float sum = warp.squares[n];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (warp.thread == 0) place<float>(at.squares)[warp.warp * kLines + n * kLineTile + warp.group] = sum;
    }
  }

  // One over the root mean square of each line.
  __device__ void put_scale() const {
    for (int line = thread; line < active; line += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += place<float>(at.squares)[w * kLines + line];
      place<float>(at.scale)[line] = 1.0f / sqrtf(sum / static_cast<float>(p.k) + p.eps);
    }
  }

  // Fragments first .. last - 1 of this warp, of those that hold lines; a fragment is a tile of 16 rows by eight lines.
  __device__ void put_partials(const Multiplier<Size, kNormalizes>& warp, const Pass& pass, int line_tiles, int columns, int first,
                               int last) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kLineTiles; ++n) {
        const int fragment = m * line_tiles + n;
        if (m >= pass.tiles || n >= line_tiles || fragment < first || fragment >= last) continue;
        float* slot = place<float>(at.partial) + ((fragment - first) * kWarps + warp.warp) * columns * kPartialPitch;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = 2 * warp.thread + j % 2;
          if (column < columns) slot[column * kPartialPitch + warp.group + j / 2 * kPanel] = warp.sums[m][n][j];
        }
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
    const int first = output_of<kEpilogue>(p, share, pass.first_tile + m, g);
    if constexpr (kEpilogue == Epilogue::kSwiglu) {
      if (first >= 0) out[first] = silu_times<Bf16>(rounded<Bf16>(low + bias(first)), rounded<Bf16>(high + bias(p.n + first)));
    } else {
      const int second = output_of<kEpilogue>(p, share, pass.first_tile + m, g + kPanel);
      const Bf16* old = place<Bf16>(at.residual) + (m * kLines + line) * kTileRows + g;
      if (first >= 0) out[first] = finished(low + bias(first), old);
      if (second >= 0) out[second] = finished(high + bias(second), old + kPanel);
    }
  }

  __device__ Bf16 finished(float v, const Bf16* old) const {
    if constexpr (kEpilogue == Epilogue::kResidual) v = to_float(*old) + rounded<Bf16>(v);
    return from_float<Bf16>(v);
  }
};

}  // namespace photon::cuda::stream_linear
