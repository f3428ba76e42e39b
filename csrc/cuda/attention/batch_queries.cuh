// The queries of a one-warp CTA's tile range, and the new key and value, where bits may depend on
// the batch: as warp_sums.cuh, but eight lanes have a vector, so that four are normalized and
// rotated side by side, and squares are summed in another order.
#pragma once
#include "common/kv.h"
#include "cuda/attention/warp_tiles.cuh"

namespace photon::cuda {

// Some dims of a vector, and those that they rotate with.
struct DimPairs {
  uint4 low, high;

  __device__ static DimPairs load(const Bf16* x, int apart, bool present) {
    const auto* at = reinterpret_cast<const uint4*>(x);
    const uint4 zeros = {0, 0, 0, 0};
    return {present ? at[0] : zeros, present ? at[apart / kPack] : zeros};
  }

  __device__ void store(Bf16* x, int apart) const {
    auto* at = reinterpret_cast<uint4*>(x);
    at[0] = low;
    at[apart / kPack] = high;
  }
};

// The same in float32.
struct FloatPairs {
  float low[kPack], high[kPack];

  __device__ static FloatPairs of(const DimPairs& pairs) {
    FloatPairs floats;
    unpack(pairs.low, floats.low);
    unpack(pairs.high, floats.high);
    return floats;
  }

  // Zeros if they are not `present`.
  __device__ static FloatPairs load(const float* x, int apart, bool present) {
    FloatPairs floats = {};
    if (!present) return floats;
#pragma unroll
    for (int i = 0; i < kPack / 4; ++i) {
      reinterpret_cast<float4*>(floats.low)[i] = reinterpret_cast<const float4*>(x)[i];
      reinterpret_cast<float4*>(floats.high)[i] = reinterpret_cast<const float4*>(x + apart)[i];
    }
    return floats;
  }

  __device__ DimPairs packed() const { return {packed(low), packed(high)}; }

 private:
  __device__ static void unpack(const uint4& vector, float (&floats)[kPack]) {
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      floats[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  }
  __device__ static uint4 packed(const float (&floats)[kPack]) {
    return {pack_bf16(floats[0], floats[1]), pack_bf16(floats[2], floats[3]),
            pack_bf16(floats[4], floats[5]), pack_bf16(floats[6], floats[7])};
  }
};

// As WarpQueries.
template <int kHeadDim>
struct BatchQueries {
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;
  static constexpr int kApart = kHeadDim / 2, kLanes = kApart / kPack;  // of a vector
  static constexpr int kAtOnce = kWarpSize / kLanes;
  static constexpr int kTurns = (Shared::kQueries + 2 + kAtOnce - 1) / kAtOnce;

  uint32_t at[Shape::kFragments][2];

  __device__ bool prepare(const RopeParams& rope, const SplitGrid& grid, const RangeCursor& range,
                          Shared& shared) {
    const SplitGroupHeads heads = SplitGroupHeads::of(grid, range.split_group, kHalfQueries);
    const int first_dim = threadIdx.x % kLanes * kPack;
    const bool can_be = can_rotate(rope, range.token);
    const int32_t page = grid.cache.request(grid.cache.pages_of(range.token.row), range.token.row,
                                            range.token.position, can_be);
    const int64_t angles_at = static_cast<int64_t>(range.token.position) * kHeadDim + first_dim;
    const FloatPairs cos = FloatPairs::load(rope.cos + angles_at, kApart, can_be),
                     sin = FloatPairs::load(rope.sin + angles_at, kApart, can_be);
    const int32_t owned = range.new_position() >= 0 ? range.new_position() : range.length - 1;
    const KvPlaces own = grid.cache.places(page, heads.kv_head, range.token.position);
    const bool is_live = own.k != kAbsent;
    const bool owns_new =
        is_live && owned >= range.begin_position(grid) && owned < range.end_position(grid);
    const int vectors = heads.count + (owns_new ? 2 : 0);  // the key and the value come last
    DimPairs loaded[kTurns], gains[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const void* const norm = vector(turn) < heads.count ? rope.q_norm : rope.k_norm;
      gains[turn] = DimPairs::load(static_cast<const Bf16*>(norm) + first_dim, kApart,
                                   vector(turn) < vectors && norm != nullptr);
    }
    wait_for_earlier();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = vector(turn) - heads.count;
      const Bf16* x = i < 0    ? grid.q.at(range.index, heads.first + vector(turn))
                      : i == 0 ? grid.k.at(range.index, heads.kv_head)
                               : grid.v.at(range.index, heads.kv_head);
      loaded[turn] = DimPairs::load(x + first_dim, kApart, vector(turn) < vectors);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * kAtOnce >= vectors) break;
      const int i = vector(turn) - heads.count;
      const bool is_normed = (i < 0 ? rope.q_norm : rope.k_norm) != nullptr;
      DimPairs& pairs = loaded[turn];
      const DimPairs rotated = rotate(pairs, is_normed, gains[turn], cos, sin, rope.eps);
      if (i <= 0) pairs = rotated;
      if (vector(turn) >= vectors) continue;
      pairs.store((i < 0    ? shared.queries[vector(turn)]
                   : i == 0 ? shared.new_k
                            : shared.new_v) +
                      first_dim,
                  kApart);
      if (i >= 0) {
        pairs.store((i == 0 ? grid.cache.k : grid.cache.v) +
                        static_cast<size_t>(i == 0 ? own.k : own.v) * kPack + first_dim,
                    kApart);
      }
    }
    __syncwarp();
    take(shared, heads.count);
    __syncwarp();
    return is_live;
  }

 private:
  // Which vector the lane has a part of.
  __device__ static int vector(int turn) {
    return turn * kAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  }

  // As rotate_pairs().
  __device__ static DimPairs rotate(const DimPairs& x, bool is_normed, const DimPairs& gain,
                                    const FloatPairs& cos, const FloatPairs& sin, float eps) {
    FloatPairs v = FloatPairs::of(x), out;
    const FloatPairs gains = FloatPairs::of(gain);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      squares = fmaf(v.high[i], v.high[i], fmaf(v.low[i], v.low[i], squares));
    const float scale = rsqrtf(warp_sum<kLanes>(squares) / static_cast<float>(kHeadDim) + eps);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      float low = v.low[i] * scale, high = v.high[i] * scale;
      round_both<Bf16>(low, high);
      low *= gains.low[i];
      high *= gains.high[i];
      round_both<Bf16>(low, high);
      v.low[i] = is_normed ? low : v.low[i];
      v.high[i] = is_normed ? high : v.high[i];
      out.low[i] = fmaf(v.low[i], cos.low[i], -(v.high[i] * sin.low[i]));
      out.high[i] = fmaf(v.high[i], cos.high[i], v.low[i] * sin.high[i]);
    }
    return out.packed();
  }

  // Rows without a query get the last one.
  __device__ void take(const Shared& shared, int queries) {
    const int lane = threadIdx.x % kWarpSize;
    const Bf16* row = shared.queries[min(lane % 8, queries - 1)] + lane / 8 * kPack;
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; fragment += 2) {
      uint32_t two[4];
      load_matrices(two, row + fragment * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) at[fragment + i / 2][i % 2] = two[i];
    }
  }
};

}  // namespace photon::cuda
