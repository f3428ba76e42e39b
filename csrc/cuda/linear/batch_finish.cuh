// From a warp group's sums to outputs, in the linears of a batch (batch_linear.cuh).
#pragma once
#include "cuda/element.cuh"
#include "cuda/linear/batch_tiles.cuh"
#include "cuda/log2e.cuh"

namespace photon::cuda::batch {

// silu_times of element.cuh without a branch, of two gates and their ups.
__device__ inline uint32_t fast_silu_times(float gate, float up, float gate2, float up2) {
  round_both<Bf16>(gate, up);
  round_both<Bf16>(gate2, up2);
  float silu = gate * reciprocal_approx(1.0f + exp2_approx(gate * -kLog2E)),
        silu2 = gate2 * reciprocal_approx(1.0f + exp2_approx(gate2 * -kLog2E));
  round_both<Bf16>(silu, silu2);
  return pack_bf16(silu * up, silu2 * up2);
}

// The two CTAs of a cluster have the sums of one part of the columns each. The first finishes the
// first half of the tile's rows, the second the other half: what a CTA does not finish stays in its
// shared memory, where the other one reads it.
template <int kBlocks, int kRows>
struct Exchange {
  static constexpr int kMine = kRows / 16, kHalf = kRows / 4;  // eights of rows; a lane's sums
  static constexpr int kBytes =
      kBlocks * kWarpgroupThreads * kHalf * static_cast<int>(sizeof(float));
  static_assert(kRows % 16 == 0);

  bool is_second;
  float4* place;  // of a thread; vectors of a warp group's threads side by side

  __device__ Exchange(unsigned char* shared, int block)
      : is_second(cluster_rank() != 0),
        place(reinterpret_cast<float4*>(shared) + block * kMine * kWarpgroupThreads +
              threadIdx.x % kWarpgroupThreads) {}

  __device__ void leave(const float (&sum)[kRows / 2]) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const auto value = [&](int j) { return is_second ? sum[4 * i + j] : sum[kHalf + 4 * i + j]; };
      place[i * kWarpgroupThreads] = make_float4(value(0), value(1), value(2), value(3));
    }
  }

  // The sums of what this CTA finishes, in the first places of `sum`.
  __device__ void add(float (&sum)[kRows / 2]) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const float4 v = load_from_block(place + i * kWarpgroupThreads, is_second ? 0 : 1);
      const float values[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sum[4 * i + j] = (is_second ? sum[kHalf + 4 * i + j] : sum[4 * i + j]) + values[j];
    }
  }
};

// A lane has two tokens, eight apart, and of each eight rows two side by side; of SwiGLU's these
// are the gate and the up row of one output. kEights: of rows, from `first_eight` of the tile on,
// which `sum` begins with.
template <int kRows, Finish kFinish, int kEights>
struct Writer {
  static constexpr int kColumns = kOutputs<kEights * 8, kFinish>;
  static constexpr int kWarpTokens = 16;
  static constexpr int kStride = kColumns * 2 + 16;  // bytes, of a token in shared memory
  static constexpr int kWarpBytes = kWarpTokens * kStride;

  const Params& p;
  const Tile& tile;
  int block, active, first_eight;

  template <int kSums>
  __device__ void run(const float (&sum)[kSums], unsigned char* shared) const {
    if constexpr (kFinish == Finish::kPartial) {
      store_sums(sum);
    } else {
      unsigned char* const own = shared + (block * 4 + warp()) * kWarpBytes;
      if (p.bias != nullptr) {
        stage(sum, own, [&](int row, int rows) { return to_float(p.bias[min(row, rows - 1)]); });
      } else {
        stage(sum, own, [](int, int) { return 0.0f; });
      }
      __syncwarp();
      store_outputs(own);
    }
  }

 private:
  __device__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarpSize % 4; }
  __device__ int warp_token() const {
    return tile.first_token + block * kBatchBlockTokens + warp() * kWarpTokens;
  }
  __device__ int first_column() const {
    return tile.row_tile * kOutputs<kRows, kFinish> + first_eight * kOutputs<8, kFinish>;
  }

  template <int kSums>
  __device__ void store_sums(const float (&sum)[kSums]) const {
    const int column = first_column() + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = warp_token() + lane() / 4 + half * 8;
      if (token >= active) continue;
      float* const to =
          p.partial + (static_cast<int64_t>(tile.part) * p.tokens + token) * p.n + column;
#pragma unroll
      for (int i = 0; i < kEights; ++i)
        if (column + i * 8 < p.n)
          *reinterpret_cast<float2*>(to + i * 8) =
              make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
    }
  }

  template <int kSums, typename Bias>
  __device__ void stage(const float (&sum)[kSums], unsigned char* own, const Bias& bias) const {
    unsigned char* const at = own + lane() / 4 * kStride;
    const int first = first_column(), t = lane() % 4;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const float* const s = sum + 4 * i;
      if constexpr (kFinish == Finish::kSwiglu) {
        const int unit = i * 4 + t;
        const float gate = bias(first + unit, p.n), up = bias(p.n + first + unit, 2 * p.n);
        const uint32_t both = fast_silu_times(s[0] + gate, s[1] + up, s[2] + gate, s[3] + up);
        *reinterpret_cast<uint16_t*>(at + unit * 2) = static_cast<uint16_t>(both);
        *reinterpret_cast<uint16_t*>(at + 8 * kStride + unit * 2) =
            static_cast<uint16_t>(both >> 16);
      } else {
        const int column = i * 8 + t * 2;
        const float low = bias(first + column, p.n), high = bias(first + column + 1, p.n);
        *reinterpret_cast<uint32_t*>(at + column * 2) = pack_bf16(s[0] + low, s[1] + high);
        *reinterpret_cast<uint32_t*>(at + 8 * kStride + column * 2) =
            pack_bf16(s[2] + low, s[3] + high);
      }
    }
  }

  __device__ void store_outputs(const unsigned char* own) const {
    using Vector = std::conditional_t<kColumns % 8 == 0, uint4, uint2>;
    constexpr int kElements = sizeof(Vector) / 2, kVectors = kColumns / kElements;
    const int first = first_column();
#pragma unroll
    for (int i = lane(); i < kWarpTokens * kVectors; i += kWarpSize) {
      const int token = warp_token() + i / kVectors, column = first + i % kVectors * kElements;
      if (token >= active || column >= p.n) continue;
      *reinterpret_cast<Vector*>(p.out + token * p.out_stride + column) =
          *reinterpret_cast<const Vector*>(own + i / kVectors * kStride +
                                           i % kVectors * sizeof(Vector));
    }
  }
};

}  // namespace photon::cuda::batch
