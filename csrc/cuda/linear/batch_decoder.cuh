// The warps that decode a weight of fewer bits for the linears of a batch (batch_stored.cuh).
#pragma once
#include "common/weight.h"
#include "cuda/element.cuh"
#include "cuda/linear/batch_tiles.cuh"

namespace photon::cuda::batch {

constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;

// The scales, zero points and offsets of a weight as they lie in memory.
struct Scales {
  const void* data;
  const uint8_t* zeros;  // or null
  const void* offsets;   // or null
  int row_shift;         // 2^row_shift rows share theirs
  int column_shift;      // and so do 2^column_shift columns
  int row_groups;        // scales from row to row
  bool is_half;          // of integers: float16, else bfloat16
};

constexpr int kOneGroup = 31;  // column_shift, where a row has one scale

struct StoredParams : Params {
  Scales scales;
  int stored_stages;  // of the ring of rows as they are stored
  WeightFormat format;
};

__device__ inline uint4 packed(const float (&numbers)[kPack]) {
  return make_uint4(pack_bf16(numbers[0], numbers[1]), pack_bf16(numbers[2], numbers[3]),
                    pack_bf16(numbers[4], numbers[5]), pack_bf16(numbers[6], numbers[7]));
}

__device__ inline uint32_t scaled_halves(uint32_t halves, float scale) {
  const float2 pair = floats_of_halves(halves);
  return pack_bf16(pair.x * scale, pair.y * scale);
}

// Eight of them, of which kHalves makes float16.
template <auto kHalves>
__device__ inline uint4 scaled_bytes(const uint32_t (&codes)[4], int i, float scale) {
  uint32_t low[2], high[2];
  kHalves(low, codes[2 * i]);
  kHalves(high, codes[2 * i + 1]);
  return make_uint4(scaled_halves(low[0], scale), scaled_halves(low[1], scale),
                    scaled_halves(high[0], scale), scaled_halves(high[1], scale));
}

// How a lane decodes 16 bytes of a row: to kVectors vectors of eight numbers. Eight lanes in a row
// are to meet all banks, when they read and when they write. So of the lanes with the same bytes of
// a row number i has row `row(i)`, and where `begins_odd` the second vector of each two is written
// first. `Scale`: as it comes from memory, of a group of columns.
struct Fp8Codes {
  using Scale = float;
  static constexpr int kBlockBytes = 64;  // of a row's K block
  static constexpr int kVectors = 2;

  float scale;

  __device__ Fp8Codes(const Scales&, float scale) : scale(scale) {}

  __device__ static int row(int i) { return i % 2 * 4 + i / 2; }
  __device__ static bool begins_odd(int row, int) { return row & 4; }

  __device__ static Scale load(const Scales& from, int place) {
    return static_cast<const float*>(from.data)[place];
  }

  __device__ uint4 decode(const uint32_t (&codes)[4], int i) const {
    return scaled_bytes<halves_of_e4m3>(codes, i, scale);
  }
};

// Scales are float16.
struct Int8Codes {
  using Scale = uint16_t;
  static constexpr int kBlockBytes = 64;
  static constexpr int kVectors = 2;

  float scale;

  __device__ Int8Codes(const Scales&, Scale bits) : scale(wide(bits, true)) {}

  __device__ static int row(int i) { return Fp8Codes::row(i); }
  __device__ static bool begins_odd(int row, int vector) {
    return Fp8Codes::begins_odd(row, vector);
  }

  __device__ static Scale load(const Scales& from, int place) {
    return static_cast<const uint16_t*>(from.data)[place];
  }

  __device__ uint4 decode(const uint32_t (&codes)[4], int i) const {
    return scaled_bytes<halves_of_int8>(codes, i, scale);
  }
};

// 0x4300 | q is 128 + q in bfloat16. What that is too much goes away in the fma that scales: its
// product has less than 24 bits.
struct Int4Codes {
  struct Scale {
    uint16_t bits;
    uint8_t zero;
  };
  static constexpr int kBlockBytes = 32;
  static constexpr int kVectors = 4;

  float scale, offset;

  __device__ Int4Codes(const Scales& of, Scale one)
      : scale(wide(one.bits, of.is_half)), offset(-(128.0f + one.zero) * scale) {}

  __device__ static int row(int i) { return i / 8 * 8 + i % 4 * 2 + i / 4 % 2; }
  __device__ static bool begins_odd(int, int vector) { return vector & 1; }

  __device__ static Scale load(const Scales& from, int place) {
    return {static_cast<const uint16_t*>(from.data)[place],
            from.zeros == nullptr ? uint8_t{8} : from.zeros[place]};
  }

  __device__ uint4 decode(const uint32_t (&codes)[4], int i) const {
    float numbers[kPack];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = masked_or(codes[i] >> (4 * j), 0x000f000fu, 0x43004300u);
      numbers[j] = fmaf(__uint_as_float(pair << 16), scale, offset);
      numbers[j + 4] = fmaf(__uint_as_float(pair & 0xffff0000u), scale, offset);
    }
    return packed(numbers);
  }
};

// With offsets, to which nothing may be added before; these and scales are float16. 0x6400 | q is
// 1024 + q in float16, and q is left of it.
struct Int4OffsetCodes {
  struct Scale {
    uint16_t scale, offset;
  };
  static constexpr int kBlockBytes = Int4Codes::kBlockBytes;
  static constexpr int kVectors = Int4Codes::kVectors;

  float scale, offset;

  __device__ Int4OffsetCodes(const Scales&, Scale one)
      : scale(wide(one.scale, true)), offset(wide(one.offset, true)) {}

  __device__ static int row(int i) { return Int4Codes::row(i); }
  __device__ static bool begins_odd(int row, int vector) {
    return Int4Codes::begins_odd(row, vector);
  }

  __device__ static Scale load(const Scales& from, int place) {
    return {static_cast<const uint16_t*>(from.data)[place],
            static_cast<const uint16_t*>(from.offsets)[place]};
  }

  __device__ uint4 decode(const uint32_t (&codes)[4], int i) const {
    constexpr uint32_t kOnes = 0x64006400u;
    float numbers[kPack];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = masked_or(codes[i] >> (4 * j), 0x000f000fu, kOnes);
      const float2 bits = floats_of_halves(minus_f16(pair, kOnes));
      numbers[j] = fmaf(bits.x, scale, offset);
      numbers[j + 4] = fmaf(bits.y, scale, offset);
    }
    return packed(numbers);
  }
};

// Of a thread of the warps that decode: its rows of a tile, from pass to pass, and 16 bytes of a K
// block of each.
template <typename Codes, int kRows, Finish kFinish>
struct Decoder {
  static constexpr int kLanes = Codes::kBlockBytes / 16;  // of a row
  static constexpr int kWarpRows = kWarpSize / kLanes, kPassRows = kGroupWarps * kWarpRows;
  static constexpr int kPasses = (kRows + kPassRows - 1) / kPassRows;
  static constexpr int kStageBlocks = kBatchRowBytes / Codes::kBlockBytes;  // of stored rows
  static_assert(kPassRows % kRowTileRows == 0);  // so that all passes have the same places

  const Scales& scales;
  int first_row, vector;
  int from, to;         // the lane's bytes in a stage of rows as they are stored, and in a K block
  bool begins_odd;      // second vectors are written first
  int before[kPasses];  // how many scales come before those of a row
  typename Codes::Scale following[kPasses];  // of the next K block

  __device__ Decoder(const StoredParams& p, const Tile& tile, int k_block) : scales(p.scales) {
    const int lane = threadIdx.x % kWarpSize,
              warp = static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps;
    vector = lane % kLanes;
    first_row = warp * kWarpRows + Codes::row(lane / kLanes);
    begins_odd = Codes::begins_odd(first_row, vector);
    const int turn = first_row % kRowTileRows, first = first_row * kBatchRowBytes;
    from = first + (vector ^ turn) * 16;
    to = first + ((vector * Codes::kVectors + (begins_odd ? 1 : 0)) ^ turn) * 16;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = weight_row(p, tile, i * kPassRows + first_row);
      before[i] = (row >> scales.row_shift) * scales.row_groups;
    }
    load_scales(k_block);
  }

  // From a stage of rows as they are stored, of which it is K block `place`, to a K block of the
  // ring. Meanwhile the scales of K block `next` of the weight are fetched.
  __device__ void decode(const unsigned char* stored, int place, unsigned char* block, int next) {
    typename Codes::Scale own[kPasses];
    uint4 codes[kPasses];
    const unsigned char* const rows = stored + (from ^ (place * Codes::kBlockBytes));
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      own[i] = following[i];
      const auto* const at = reinterpret_cast<const uint4*>(rows + i * kPassRows * kBatchRowBytes);
      codes[i] = has_row(i) ? *at : uint4{};
    }
    if (scales.column_shift < kOneGroup) load_scales(next);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (has_row(i))
        store_numbers(block + i * kPassRows * kBatchRowBytes, codes[i], Codes(scales, own[i]));
    }
  }

 private:
  __device__ bool has_row(int pass) const {
    return (pass + 1) * kPassRows <= kRows || pass * kPassRows + first_row < kRows;
  }

  // The row of the weight that is row `r` of the tile, or the last one.
  __device__ static int weight_row(const Params& p, const Tile& tile, int r) {
    const int first = tile.row_tile * kOutputs<kRows, kFinish>;
    if constexpr (kFinish == Finish::kSwiglu)
      return min(first + r / 2, p.n - 1) + (r % 2 == 0 ? 0 : p.n);
    return min(first + r, p.n - 1);
  }

  __device__ void load_scales(int k_block) {
    const int column = k_block * kKBlockColumns + vector * (kKBlockColumns / kLanes);
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      following[i] = Codes::load(scales, before[i] + (column >> scales.column_shift));
  }

  __device__ void store_numbers(unsigned char* rows, const uint4& v, const Codes& codes) const {
    constexpr int kVectorWords = 4 / Codes::kVectors;
    const uint32_t loaded[] = {v.x, v.y, v.z, v.w};
    uint32_t words[4];  // in the order in which their vectors are written
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = begins_odd ? loaded[j ^ kVectorWords] : loaded[j];
#pragma unroll
    for (int j = 0; j < Codes::kVectors; ++j)
      *reinterpret_cast<uint4*>(rows + (to ^ (j * 16))) = codes.decode(words, j);
  }
};

}  // namespace photon::cuda::batch
