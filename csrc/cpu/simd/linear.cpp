#include "cpu/simd/dot.h"
#include "cpu/simd/functions.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

constexpr int64_t kTokenBlockFloats =
    96 * 1024;  // tokens of x that a pass over the weights keeps in the second-level cache

// How far ahead of its place a single stream of weights is read: beyond what the hardware
// prefetcher covers.
constexpr int64_t kStreamAheadBytes = 8192;

template <typename T>
struct Block {
  T* out;
  const float* x;
  const T* weight;
  const T* bias;
  int64_t tokens, n, k, out_stride, x_stride, weight_stride;
};

template <typename T, int M, int N>
void tile(const Block<T>& b, int64_t token, int64_t row) {
  constexpr int kPadded = (M * N + kLanes - 1) / kLanes * kLanes;
  float dots[kPadded];
  const T* rows[N];
  PHOTON_UNROLL
  for (int j = 0; j < N; ++j) rows[j] = b.weight + (row + j) * b.weight_stride;
  const int64_t ahead = N == 1 ? kStreamAheadBytes / static_cast<int64_t>(sizeof(T))
                               : N * b.weight_stride;  // or the next tile's rows
  dot_tile<T, M, N>(b.x + token * b.x_stride, b.x_stride, rows, b.k, ahead, dots);
  for (int i = M * N; i < kPadded; ++i) dots[i] = 0.0f;
  if (b.bias != nullptr) {
    float bias[kLanes];
    store(bias, load_some(b.bias + row, N));
    for (int i = 0; i < M * N; ++i) dots[i] += bias[i % N];
  }
  T rounded[kPadded];
  for (int i = 0; i < kPadded; i += kLanes) store(rounded + i, load(dots + i));
  PHOTON_UNROLL
  for (int i = 0; i < M; ++i)
    __builtin_memcpy(b.out + (token + i) * b.out_stride + row, rounded + i * N, N * sizeof(T));
}

template <typename T, int N, int M = kTileTokens>
PHOTON_INLINE void tile_of(int tokens, const Block<T>& b, int64_t token, int64_t row) {
  if constexpr (M > 1) {
    if (tokens < M) return tile_of<T, N, M - 1>(tokens, b, token, row);
  }
  tile<T, M, N>(b, token, row);
}

// Tokens begin .. end against N rows, in tiles of nearly equal height.
template <typename T, int N>
void tokens_of(const Block<T>& b, int64_t begin, int64_t end, int64_t row) {
  for (int64_t token = begin; token < end;) {
    const int64_t left = end - token, tiles = (left + kTileTokens - 1) / kTileTokens;
    const int64_t height = (left + tiles - 1) / tiles;
    tile_of<T, N>(static_cast<int>(height), b, token, row);
    token += height;
  }
}

template <typename T>
void linear_of(const Block<T>& b) {
  if (b.tokens == 1) {  // reading the weights is the work, and one stream is read fastest
    for (int64_t row = 0; row < b.n; ++row) tile<T, 1, 1>(b, 0, row);
    return;
  }
  const int64_t fit = kTokenBlockFloats / (b.k + 1),
                block = fit < kTileTokens ? kTileTokens : fit / kTileTokens * kTileTokens;
  for (int64_t begin = 0; begin < b.tokens; begin += block) {
    const int64_t end = begin + block < b.tokens ? begin + block : b.tokens;
    int64_t row = 0;
    for (; row + kTileRows <= b.n; row += kTileRows) tokens_of<T, kTileRows>(b, begin, end, row);
    for (; row < b.n; ++row) tokens_of<T, 1>(b, begin, end, row);
  }
}

}  // namespace

void linear(const LinearBlock& b) {
  with_type(b.dtype, [&](auto element) {
    using T = decltype(element);
    linear_of<T>({static_cast<T*>(b.out), b.x, static_cast<const T*>(b.weight),
                  static_cast<const T*>(b.bias), b.tokens, b.n, b.k, b.out_stride, b.x_stride,
                  b.weight_stride});
  });
}

}  // namespace photon::cpu::PHOTON_ISA
