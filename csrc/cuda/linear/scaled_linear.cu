// Linears of weights that are stored in fewer bits, with scales, by the portable kernel: one for
// all such formats, few instantiations of it. A format is a decode(): eight numbers of a row.
#include "cuda/kernels.h"
#include "cuda/linear/linear_tile.cuh"
#include "cuda/linear/linear_tile.h"

namespace photon::cuda {
namespace {

constexpr int kScaledTokens = 4;  // of a tile

struct alignas(kPack) Bytes {
  uint8_t e[kPack];
};

// As load_pack(), of bytes; kVector: p is aligned to kPack.
template <bool kVector>
__device__ Bytes load_bytes(const uint8_t* p, int64_t count) {
  Bytes bytes = {};
  if constexpr (kVector) {
    if (count > 0) *reinterpret_cast<uint2*>(&bytes) = *reinterpret_cast<const uint2*>(p);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) bytes.e[i] = p[i];
    }
  }
  return bytes;
}

// e4m3: with sign, exponent and mantissa where a float has them, the number is 2^-120 times itself,
// subnormal ones included.
__device__ void decode(const Bytes& bytes, float (&out)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const uint32_t bits = bytes.e[i];
    out[i] = __uint_as_float((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
  }
}

// A row from column `begin` on. 2^shift columns share a scale.
struct ScaledRow {
  const uint8_t* data;
  const float* scales;
  int64_t begin;
  int shift;

  __device__ float scale(int64_t at) const { return scales[(begin + at) >> shift]; }
};

__device__ ScaledRow operator+(const ScaledRow& row, int64_t columns) {
  return {row.data + columns, row.scales, row.begin + columns, row.shift};
}

struct ScaledRows {
  const uint8_t* data;
  int64_t stride;
  WeightScales scales;

  __device__ ScaledRow row(int64_t r) const {
    constexpr int kBlockShift = 7, kWholeShift = 62;
    static_assert(1 << kBlockShift == kScaleBlock && kScaleBlock % kPack == 0);
    return {data + r * stride,
            scales.data + (scales.rows == 1 ? r : r / kScaleBlock) * scales.stride, 0,
            scales.columns == kScaleBlock ? kBlockShift : kWholeShift};
  }
};

// As add_dots() of a dense weight; each pack's products are summed from zero, scaled and added.
template <typename T, int kTokens, int kRows, bool kVector>
__device__ void add_dots(const T* const (&x)[kTokens], const ScaledRow (&w)[kRows], int64_t count,
                         float (&sums)[kTokens][kRows]) {
  constexpr int kAhead = 4 / kRows;  // packs of each row in flight
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarpSize) * kPack;
  for (int64_t at = first; at < count; at += kAhead * kDotStep) {
    Bytes bytes[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t here = at + a * kDotStep;
        bytes[a][r] = load_bytes<kVector>(w[r].data + here, count - here);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t here = at + a * kDotStep;
      if (here >= count) break;
      float weights[kRows][kPack], scales[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        decode(bytes[a][r], weights[r]);
        scales[r] = w[r].scale(here);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const Pack<T> xs = load_pack<kVector>(x[t] + here, count - here);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float products = 0.0f;
#pragma unroll
          for (int i = 0; i < kPack; ++i)
            products = fmaf(to_float(xs.e[i]), weights[r][i], products);
          sums[t][r] = fmaf(products, scales[r], sums[t][r]);
        }
      }
    }
  }
}

template <Epilogue kEpilogue, bool kNorm>
int launch_scaled(const LinearParams& op, void* stream) {
  const Weight& w = op.weight;
  const TileParams p = tile_params<kEpilogue>(op);
  const ScaledRows weight = {static_cast<const uint8_t*>(w.data), w.stride, w.scales};
  const bool vectors = are_tokens_vectors<kNorm>(p) && w.stride % kPack == 0 &&
                       reinterpret_cast<uintptr_t>(w.data) % kPack == 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vectors)
      return launch_tiles<kEpilogue, kNorm, T, kScaledTokens, 1, true>(p, weight, stream);
    return launch_tiles<kEpilogue, kNorm, T, kScaledTokens, 1, false>(p, weight, stream);
  });
}

}  // namespace

int run_scaled_linear(const LinearParams& p, void* stream) {
  const bool norms = p.prologue == Prologue::kRmsNorm;
  switch (p.epilogue) {
    case Epilogue::kStore:
      return norms ? launch_scaled<Epilogue::kStore, true>(p, stream)
                   : launch_scaled<Epilogue::kStore, false>(p, stream);
    case Epilogue::kSwiglu:
      return norms ? launch_scaled<Epilogue::kSwiglu, true>(p, stream)
                   : launch_scaled<Epilogue::kSwiglu, false>(p, stream);
    case Epilogue::kAdd:
      return launch_scaled<Epilogue::kAdd, false>(p, stream);
    case Epilogue::kAddNorm:
      if (const int error = launch_scaled<Epilogue::kAdd, false>(p, stream)) return error;
      return norm_residual(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace photon::cuda
