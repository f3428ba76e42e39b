#include "cpu/simd/dot.h"
#include "cpu/simd/functions.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

constexpr int64_t kLineBlockFloats = 96 * 1024;  // lines of x that a pass over the weights keeps in the second-level cache

// How far ahead of its place a single stream of weights is read: beyond what the hardware prefetcher covers.
constexpr int64_t kStreamAheadBytes = 8192;

template <typename T>
struct Block {
  T* out;
  const float* x;
  const T* weight;
  const T* bias;
  int64_t lines, n, k, out_stride, x_stride, weight_stride;
};

template <typename T, int M, int N>
void tile(const Block<T>& b, int64_t line, int64_t row) {
  constexpr int kPadded = (M * N + kLanes - 1) / kLanes * kLanes;
  float dots[kPadded];
  const T* rows[N];
  PHOTON_UNROLL
  for (int j = 0; j < N; ++j) rows[j] = b.weight + (row + j) * b.weight_stride;
  const int64_t ahead = N == 1 ? kStreamAheadBytes / static_cast<int64_t>(sizeof(T)) : N * b.weight_stride;  // or the next tile's rows
  dot_tile<T, M, N>(b.x + line * b.x_stride, b.x_stride, rows, b.k, ahead, dots);
  for (int i = M * N; i < kPadded; ++i) dots[i] = 0.0f;
  if (b.bias != nullptr) {
    float bias[kLanes];
    store(bias, load_some(b.bias + row, N));
    for (int i = 0; i < M * N; ++i) dots[i] += bias[i % N];
  }
  T rounded[kPadded];
  for (int i = 0; i < kPadded; i += kLanes) store(rounded + i, load(dots + i));
  PHOTON_UNROLL
  for (int i = 0; i < M; ++i) __builtin_memcpy(b.out + (line + i) * b.out_stride + row, rounded + i * N, N * sizeof(T));
}

template <typename T, int N, int M = kTileLines>
PHOTON_INLINE void tile_of(int lines, const Block<T>& b, int64_t line, int64_t row) {
  if constexpr (M > 1) {
    if (lines < M) return tile_of<T, N, M - 1>(lines, b, line, row);
  }
  tile<T, M, N>(b, line, row);
}

// Lines begin .. end against N rows, in tiles of nearly equal height.
template <typename T, int N>
void lines_of(const Block<T>& b, int64_t begin, int64_t end, int64_t row) {
  for (int64_t line = begin; line < end;) {
    const int64_t left = end - line, tiles = (left + kTileLines - 1) / kTileLines;
    const int64_t height = (left + tiles - 1) / tiles;
    tile_of<T, N>(static_cast<int>(height), b, line, row);
    line += height;
  }
}

template <typename T>
void linear_of(const Block<T>& b) {
  if (b.lines == 1) {  // reading the weights is the work, and one stream is read fastest
    for (int64_t row = 0; row < b.n; ++row) tile<T, 1, 1>(b, 0, row);
    return;
  }
  const int64_t fit = kLineBlockFloats / (b.k + 1), block = fit < kTileLines ? kTileLines : fit / kTileLines * kTileLines;
  for (int64_t begin = 0; begin < b.lines; begin += block) {
    const int64_t end = begin + block < b.lines ? begin + block : b.lines;
    int64_t row = 0;
    for (; row + kTileRows <= b.n; row += kTileRows) lines_of<T, kTileRows>(b, begin, end, row);
    for (; row < b.n; ++row) lines_of<T, 1>(b, begin, end, row);
  }
}

}  // namespace

void linear(const LinearBlock& b) {
  with_type(b.dtype, [&](auto element) {
    using T = decltype(element);
    linear_of<T>({static_cast<T*>(b.out), b.x, static_cast<const T*>(b.weight), static_cast<const T*>(b.bias), b.lines, b.n, b.k,
                  b.out_stride, b.x_stride, b.weight_stride});
  });
}

}  // namespace photon::cpu::PHOTON_ISA
