#include "cpu/simd/dot.h"
#include "cpu/simd/functions.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

// A tile's accumulators stay in registers, one part of the lanes at a time: with all lanes at once
// there is room for so few tokens and rows that more is loaded than multiplied.
#if defined(__AVX512F__)
constexpr int kTileTokens = 6, kTileRows = 4;  // 24 of 32 registers
#else
constexpr int kTileTokens = 4, kTileRows = 3;  // 12 of 16 registers
#endif

// What a pass over the weights keeps in caches: a block of tokens in the second level, and of a
// tile's tokens and rows a piece of k in the first.
constexpr int64_t kBlockFloats = 96 * 1024, kBlockTokens = 8 * kTileTokens, kPiece = 768;
static_assert(kBlockTokens % kLanes == 0, "sums are reduced and rounded by whole vectors");

// How far ahead of its place a single stream of weights is read: beyond what the hardware
// prefetcher covers.
constexpr int64_t kStreamAheadBytes = 8192;

// Rows of e4m3, the first of which is row `first` of their weight.
struct ScaledRows {
  const E4M3* data;
  WeightScales scales;
  int64_t first;

  float scale(int64_t row, int64_t column) const {
    return scales.data[(first + row) / scales.rows * scales.stride + column / scales.columns];
  }
};

template <typename T>
struct Block {
  T* out;
  const float* x;
  const T* weight;
  const T* bias;
  int64_t tokens, n, k, out_stride, x_stride, weight_stride;
  const ScaledRows* scaled;  // what stands for `weight`, or null
};

// Adds elements begin .. end, whole vectors, of M tokens times N rows to part p of their sums;
// those from 0 on begin the sums. Each part calls in its share of the next rows' elements begin ..
// end, so that memory never rests.
template <bool kAhead, int M, int N, typename T>
PHOTON_INLINE void add_part(const Block<T>& b, int64_t token, int64_t row, int64_t begin,
                            int64_t end, int p, Lanes* sums) {
  const float* const x = b.x + token * b.x_stride + p * kWidth;
  const T* const rows = b.weight + row * b.weight_stride;
  FloatPart acc[M * N];
  PHOTON_UNROLL
  for (int i = 0; i < M * N; ++i) acc[i] = begin > 0 ? sums[i].part[p] : FloatPart{};
  int64_t ahead = N * b.weight_stride + begin + (end - begin) / kParts * p;
  for (int64_t at = begin; at < end; at += kLanes, ahead += kWidth) {
    FloatPart weight[N];
    PHOTON_UNROLL
    for (int j = 0; j < N; ++j) {
      if constexpr (kAhead) prefetch(rows, j * b.weight_stride + ahead);
      weight[j] = load_part(rows + j * b.weight_stride + at + p * kWidth);
    }
    PHOTON_UNROLL
    for (int i = 0; i < M; ++i) {
      const FloatPart value = load_part(x + i * b.x_stride + at);
      PHOTON_UNROLL
      for (int j = 0; j < N; ++j) acc[i * N + j] = fma(value, weight[j], acc[i * N + j]);
    }
  }
  PHOTON_UNROLL
  for (int i = 0; i < M * N; ++i) sums[i].part[p] = acc[i];
}

template <bool kAhead, int M, int N, typename T>
void add_tile(const Block<T>& b, int64_t token, int64_t row, int64_t begin, int64_t end,
              Lanes* sums) {
  PHOTON_UNROLL
  for (int p = 0; p < kParts; ++p) add_part<kAhead, M, N>(b, token, row, begin, end, p, sums);
}

template <bool kAhead, int N, typename T, int M = kTileTokens>
PHOTON_INLINE void add_tile_of(int64_t tokens, const Block<T>& b, int64_t token, int64_t row,
                               int64_t begin, int64_t end, Lanes* sums) {
  if constexpr (M > 1) {
    if (tokens < M)
      return add_tile_of<kAhead, N, T, M - 1>(tokens, b, token, row, begin, end, sums);
  }
  add_tile<kAhead, M, N>(b, token, row, begin, end, sums);
}

// All tokens against N rows, elements begin .. end, in tiles of nearly equal height, of which the
// first calls in the weights of the next rows.
template <int N, typename T>
void add_tiles(const Block<T>& b, int64_t row, int64_t begin, int64_t end, Lanes* sums) {
  for (int64_t token = 0; token < b.tokens;) {
    const int64_t left = b.tokens - token, tiles = (left + kTileTokens - 1) / kTileTokens;
    const int64_t height = (left + tiles - 1) / tiles;
    if (token == 0) {
      add_tile_of<true, N>(height, b, token, row, begin, end, sums + token * N);
    } else {
      add_tile_of<false, N>(height, b, token, row, begin, end, sums + token * N);
    }
    token += height;
  }
}

// The elements behind the last whole vector.
template <int N, typename T>
void add_rest(const Block<T>& b, int64_t row, Lanes* sums) {
  const int64_t rest = b.k % kLanes, at = b.k - rest;
  for (int j = 0; j < N; ++j) {
    const Lanes weight = load_some(b.weight + (row + j) * b.weight_stride + at, rest);
    for (int64_t token = 0; token < b.tokens; ++token) {
      Lanes& to = sums[token * N + j];
      to = fma(load_some(b.x + token * b.x_stride + at, rest), weight, to);
    }
  }
}

// Reduces the sums, adds the bias and rounds, by whole vectors: sums behind the last are zeros.
template <int N, typename T>
void write_sums(const Block<T>& b, int64_t row, Lanes* sums) {
  const int64_t count = b.tokens * N;
  for (int64_t i = count; i % kLanes != 0; ++i) sums[i] = splat(0.0f);
  float dots[kBlockTokens * N];
  T rounded[kBlockTokens * N];
  for (int64_t i = 0; i < count; i += kLanes) reduce<kLanes>(sums + i, dots + i);
  if (b.bias != nullptr) {
    float bias[kLanes];
    store(bias, load_some(b.bias + row, N));
    for (int64_t i = 0; i < count; ++i) dots[i] += bias[i % N];
  }
  for (int64_t i = 0; i < count; i += kLanes) store(rounded + i, load(dots + i));
  for (int64_t token = 0; token < b.tokens; ++token)
    __builtin_memcpy(b.out + token * b.out_stride + row, rounded + token * N, N * sizeof(T));
}

template <int N, typename T>
void sum_rows(const Block<T>& b, int64_t row, Lanes* sums) {
  const int64_t whole = b.k / kLanes * kLanes;
  int64_t begin = 0;
  do {  // once if there is no whole vector: the sums become zeros
    add_tiles<N>(b, row, begin, begin + kPiece < whole ? begin + kPiece : whole, sums);
    begin += kPiece;
  } while (begin < whole);
  if (whole < b.k) add_rest<N>(b, row, sums);
}

// The columns of one scale after another, as float32: summed from zero, then scaled and added.
template <int N, typename T>
void sum_scaled_rows(const Block<T>& b, int64_t row, Lanes* sums) {
  float weight[N * kScaleBlock];
  Lanes products[kBlockTokens * N];
  for (int64_t i = 0; i < b.tokens * N; ++i) sums[i] = splat(0.0f);
  for (int64_t begin = 0; begin < b.k; begin += kScaleBlock) {
    const int64_t left = b.k - begin, count = left < kScaleBlock ? left : kScaleBlock;
    Lanes scales[N];
    for (int64_t j = 0; j < N; ++j) {
      scales[j] = splat(b.scaled->scale(row + j, begin));
      const E4M3* const from = b.scaled->data + (row + j) * b.weight_stride + begin;
      for_lanes(count, [&](int64_t i, auto load, auto store) {
        store(weight + j * kScaleBlock + i, load(from + i));
      });
    }
    sum_rows<N>(Block<float>{nullptr, b.x + begin, weight, nullptr, b.tokens, N, count, 0,
                             b.x_stride, kScaleBlock, nullptr},
                0, products);
    for (int64_t i = 0; i < b.tokens * N; ++i) sums[i] = fma(products[i], scales[i % N], sums[i]);
  }
}

template <int N, typename T>
void rows_of(const Block<T>& b, int64_t row) {
  Lanes sums[kBlockTokens * N];  // [tokens, N]
  if (b.scaled == nullptr) {
    sum_rows<N>(b, row, sums);
  } else {
    sum_scaled_rows<N>(b, row, sums);
  }
  write_sums<N>(b, row, sums);
}

template <typename T>
void block_of(const Block<T>& b) {
  int64_t row = 0;
  for (; row + kTileRows <= b.n; row += kTileRows) rows_of<kTileRows>(b, row);
  for (; row < b.n; ++row) rows_of<1>(b, row);
}

// x . row, as sum_scaled_rows() sums it.
float scaled_dot(const float* x, const ScaledRows& rows, int64_t row, int64_t stride, int64_t k) {
  const E4M3* const weight = rows.data + row * stride;
  Lanes sum = splat(0.0f);
  for (int64_t begin = 0; begin < k; begin += kScaleBlock) {
    const int64_t left = k - begin;
    Lanes products = splat(0.0f);
    for_lanes(left < kScaleBlock ? left : kScaleBlock, [&](int64_t i, auto load, auto) {
      prefetch(weight, begin + i + kStreamAheadBytes);
      products = fma(load(x + begin + i), load(weight + begin + i), products);
    });
    sum = fma(products, splat(rows.scale(row, begin)), sum);
  }
  float out;
  reduce<1>(&sum, &out);
  return out;
}

// Reading the weights is the work, and one stream is read fastest.
template <typename T>
void lone_token(const Block<T>& b) {
  for (int64_t row = 0; row < b.n; row += kLanes) {
    const int64_t count = row + kLanes < b.n ? kLanes : b.n - row;
    float dots[kLanes] = {};
    for (int64_t j = 0; j < count; ++j) {
      if (b.scaled != nullptr) {
        dots[j] = scaled_dot(b.x, *b.scaled, row + j, b.weight_stride, b.k);
        continue;
      }
      const T* const rows[] = {b.weight + (row + j) * b.weight_stride};
      dot_tile<T, 1, 1>(b.x, b.x_stride, rows, b.k,
                        kStreamAheadBytes / static_cast<int64_t>(sizeof(T)), dots + j);
    }
    const Lanes sums = load(dots);
    store_some(b.out + row, b.bias == nullptr ? sums : sums + load_some(b.bias + row, count),
               count);
  }
}

template <typename T>
void linear_of(const Block<T>& b) {
  if (b.tokens == 1) return lone_token(b);
  const int64_t fit = kBlockFloats / (b.k + 1) / kTileTokens * kTileTokens,
                most = fit < kBlockTokens ? fit : kBlockTokens,
                block = most < kTileTokens ? kTileTokens : most;
  for (int64_t token = 0; token < b.tokens; token += block) {
    Block<T> some = b;
    some.x += token * b.x_stride;
    some.out += token * b.out_stride;
    some.tokens = block < b.tokens - token ? block : b.tokens - token;
    block_of(some);
  }
}

}  // namespace

void linear(const LinearBlock& b) {
  const Weight& w = b.weight;
  const int64_t offset = b.first * w.stride;
  const bool is_fp8 = w.format == WeightFormat::kFp8;
  const ScaledRows scaled = {static_cast<const E4M3*>(w.data) + (is_fp8 ? offset : 0), w.scales,
                             b.first};
  with_type(b.dtype, [&](auto element) {
    using T = decltype(element);
    const T* const bias = static_cast<const T*>(b.bias);
    linear_of<T>({static_cast<T*>(b.out) + b.first, b.x,
                  is_fp8 ? nullptr : static_cast<const T*>(w.data) + offset,
                  bias != nullptr ? bias + b.first : nullptr, b.tokens, b.rows, w.k, b.out_stride,
                  b.x_stride, w.stride, is_fp8 ? &scaled : nullptr});
  });
}

}  // namespace photon::cpu::PHOTON_ISA
