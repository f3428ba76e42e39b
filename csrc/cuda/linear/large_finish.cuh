// From the totals of a tile to outputs, in the linears for many tokens (large_linear.cuh).
#pragma once
#include "cuda/linear/large_tiles.cuh"

namespace photon::cuda::stream_linear::large {

// From a lane's totals to outputs, as Output does it in stream_common.cuh. A lane has two tokens,
// eight apart, and of each eight rows two side by side.
template <int kRows, Epilogue kEpilogue>
struct Finish {
  static constexpr int kEights = kRows / kRowTileRows;

  const Params& p;
  int active;

  __device__ void run(const float (&total)[kRows / 2], int tile_token, int row_tile) const {
    const int lane = threadIdx.x % kWarpSize,
              token = tile_token + static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane / 4;
    const int column = row_tile * outputs_of<kRows>(p) + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = token + half * 8;
      if (own >= active) continue;
      Bf16* const out = p.out + own * p.out_stride;
      if constexpr (kEpilogue == Epilogue::kAdd) {
        add(total, half, out, column);
      } else if (p.is_swiglu) {
        gate(total, half, p.scale[own], out, column);
      } else {
        write(total, half, p.scale[own], out, column);
      }
    }
  }

 private:
  __device__ float bias(int row) const { return p.bias != nullptr ? to_float(p.bias[row]) : 0.0f; }

  __device__ void store(Bf16* out, int column, Bf16 first, Bf16 second) const {
    if (p.stores_pairs && column + 1 < p.n) {
      *reinterpret_cast<__nv_bfloat162*>(out + column) = __nv_bfloat162{first, second};
      return;
    }
    if (column < p.n) out[column] = first;
    if (column + 1 < p.n) out[column + 1] = second;
  }

  __device__ void write(const float (&total)[kRows / 2], int half, float scale, Bf16* out,
                        int column) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n, column += kRowTileRows) {
      if (column >= p.n) return;
      const auto value = [&](int i, int at) {
        return from_float<Bf16>(__fmul_rn(total[4 * n + 2 * half + i], scale) + bias(at));
      };
      store(out, column, value(0, column), value(1, min(column + 1, p.n - 1)));
    }
  }

  __device__ void gate(const float (&total)[kRows / 2], int half, float scale, Bf16* out,
                       int column) const {
#pragma unroll
    for (int n = 0; n < kEights / 2; ++n, column += kRowTileRows) {
      if (column >= p.n) return;
      const auto value = [&](int i, int at) {
        const float low = __fmul_rn(total[4 * n + 2 * half + i], scale),
                    high = __fmul_rn(total[4 * (n + kEights / 2) + 2 * half + i], scale);
        return silu_times<Bf16>(rounded<Bf16>(low + bias(at)),
                                rounded<Bf16>(high + bias(p.n + at)));
      };
      store(out, column, value(0, column), value(1, min(column + 1, p.n - 1)));
    }
  }

  // Columns come in whole eights, and their rows are aligned. What out holds is requested for some
  // eights at once.
  __device__ void add(const float (&total)[kRows / 2], int half, Bf16* out, int column) const {
    constexpr int kAtOnce = kEights < 6 ? kEights : 6;
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
      int32_t old[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = column + (first + i) * kRowTileRows;
        old[i] = first + i < kEights && at < p.n
                     ? load_fresh(reinterpret_cast<const int32_t*>(out + at))
                     : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i, at = column + n * kRowTileRows;
        if (n >= kEights || at >= p.n) continue;
        const float low = rounded<Bf16>(total[4 * n + 2 * half] + bias(at)),
                    high = rounded<Bf16>(total[4 * n + 2 * half + 1] + bias(at + 1));
        __nv_bfloat162 before;
        memcpy(&before, &old[i], sizeof(before));
        *reinterpret_cast<uint32_t*>(out + at) =
            pack_bf16(to_float(before.x) + low, to_float(before.y) + high);
      }
    }
  }
};

}  // namespace photon::cuda::stream_linear::large
