// Linears of weights that are stored in fewer bits, by the portable kernel: one for all such
// formats, few instantiations of it. What a format is, cuda/stored_row.cuh says.
#include "cuda/kernels.h"
#include "cuda/linear/linear_tile.cuh"
#include "cuda/linear/linear_tile.h"
#include "cuda/stored_row.cuh"

namespace photon::cuda {
namespace {

constexpr int kTileTokens = 4;

struct StoredRows {
  Weight weight;

  __device__ StoredRow row(int64_t r) const { return stored_row(weight, r); }
};

// As add_dots() of a dense weight, of the numbers in float32.
template <bool kFp8, typename T, int kTokens, int kRows, bool kVector>
__device__ void add_dots_of(const T* const (&x)[kTokens], const StoredRow (&w)[kRows],
                            int64_t count, float (&sums)[kTokens][kRows]) {
  constexpr int kAhead = kFp8 ? 4 / kRows : 1;  // packs of each row in flight
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarpSize) * kPack;
  for (int64_t at = first; at < count; at += kAhead * kDotStep) {
    StoredPack packs[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t here = at + a * kDotStep;
      if (here >= count) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t c = w[r].begin + here;
        packs[a][r] =
            kFp8 ? load_fp8<kVector>(w[r], c, count - here) : load_block<kVector>(w[r], c);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t here = at + a * kDotStep;
      if (here >= count) break;
      float numbers[kRows][kPack];
#pragma unroll
      for (int r = 0; r < kRows; ++r) decode<kFp8>(packs[a][r], numbers[r]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const Pack<T> xs = load_pack<kVector>(x[t] + here, count - here);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            sums[t][r] = fmaf(to_float(xs.e[i]), numbers[r][i], sums[t][r]);
        }
      }
    }
  }
}

}  // namespace

// Found by the type of its rows.
template <typename T, int kTokens, int kRows, bool kVector>
__device__ void add_dots(const T* const (&x)[kTokens], const StoredRow (&w)[kRows], int64_t count,
                         float (&sums)[kTokens][kRows]) {
  if (w[0].format == WeightFormat::kFp8) {
    add_dots_of<true, T, kTokens, kRows, kVector>(x, w, count, sums);
  } else {
    add_dots_of<false, T, kTokens, kRows, kVector>(x, w, count, sums);
  }
}

namespace {

template <Epilogue kEpilogue, bool kNorm>
int launch_stored(const LinearParams& op, void* stream) {
  const Weight& w = op.weight;
  const TileParams p = tile_params<kEpilogue>(op);
  const int alignment = w.format == WeightFormat::kFp8 ? kPack : 2;
  const bool vectors = are_tokens_vectors<kNorm>(p) && w.stride % alignment == 0 &&
                       reinterpret_cast<uintptr_t>(w.data) % alignment == 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vectors)
      return launch_tiles<kEpilogue, kNorm, T, kTileTokens, 1, true>(p, StoredRows{w}, stream);
    return launch_tiles<kEpilogue, kNorm, T, kTileTokens, 1, false>(p, StoredRows{w}, stream);
  });
}

}  // namespace

int run_stored_linear(const LinearParams& p, void* stream) {
  const bool norms = p.prologue == Prologue::kRmsNorm;
  switch (p.epilogue) {
    case Epilogue::kStore:
      return norms ? launch_stored<Epilogue::kStore, true>(p, stream)
                   : launch_stored<Epilogue::kStore, false>(p, stream);
    case Epilogue::kSwiglu:
      return norms ? launch_stored<Epilogue::kSwiglu, true>(p, stream)
                   : launch_stored<Epilogue::kSwiglu, false>(p, stream);
    case Epilogue::kAdd:
      return launch_stored<Epilogue::kAdd, false>(p, stream);
    case Epilogue::kAddNorm:
      if (const int error = launch_stored<Epilogue::kAdd, false>(p, stream)) return error;
      return norm_residual(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace photon::cuda
