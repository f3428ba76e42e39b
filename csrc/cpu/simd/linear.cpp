#include "cpu/simd/formats.h"
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

template <typename T>
struct Block {
  T* out;
  const float* x;
  const T* weight;
  const T* bias;
  int64_t tokens, n, k, out_stride, x_stride, weight_stride;
  const LinearBlock* stored;  // whose weight, which is not dense, stands for `weight`; or null
};

// Elements of a row, whole vectors; the first of a row begin its sums.
struct Piece {
  int64_t begin, end;
  bool begins;
};

// Adds a piece of M tokens times N rows to part p of their sums. Each part calls in its share of
// the next rows' piece, so that memory never rests.
template <bool kAhead, int M, int N, typename T>
PHOTON_INLINE void add_part(const Block<T>& b, int64_t token, int64_t row, const Piece& piece,
                            int p, Lanes* sums) {
  const auto [begin, end, begins] = piece;
  const float* const x = b.x + token * b.x_stride + p * kWidth;
  const T* const rows = b.weight + row * b.weight_stride;
  FloatPart acc[M * N];
  PHOTON_UNROLL
  for (int i = 0; i < M * N; ++i) acc[i] = begins ? FloatPart{} : sums[i].part[p];
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
void add_tile(const Block<T>& b, int64_t token, int64_t row, const Piece& piece, Lanes* sums) {
  PHOTON_UNROLL
  for (int p = 0; p < kParts; ++p) add_part<kAhead, M, N>(b, token, row, piece, p, sums);
}

template <bool kAhead, int N, typename T, int M = kTileTokens>
PHOTON_INLINE void add_tile_of(int64_t tokens, const Block<T>& b, int64_t token, int64_t row,
                               const Piece& piece, Lanes* sums) {
  if constexpr (M > 1) {
    if (tokens < M) return add_tile_of<kAhead, N, T, M - 1>(tokens, b, token, row, piece, sums);
  }
  add_tile<kAhead, M, N>(b, token, row, piece, sums);
}

// All tokens against a piece of N rows, in tiles of nearly equal height, of which the first calls
// in the weights of the next rows.
template <int N, typename T>
void add_tiles(const Block<T>& b, int64_t row, const Piece& piece, Lanes* sums) {
  for (int64_t token = 0; token < b.tokens;) {
    const int64_t left = b.tokens - token, tiles = (left + kTileTokens - 1) / kTileTokens;
    const int64_t height = (left + tiles - 1) / tiles;
    if (token == 0) {
      add_tile_of<true, N>(height, b, token, row, piece, sums + token * N);
    } else {
      add_tile_of<false, N>(height, b, token, row, piece, sums + token * N);
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
    const int64_t end = begin + kPiece < whole ? begin + kPiece : whole;
    add_tiles<N>(b, row, {begin, end, begin == 0}, sums);
    begin += kPiece;
  } while (begin < whole);
  if (whole < b.k) add_rest<N>(b, row, sums);
}

// As sum_rows() of the weight's numbers in float32, of which some columns are there at a time.
template <int N, typename T>
void sum_stored_rows(const Block<T>& b, int64_t row, Lanes* sums) {
  float numbers[N * kDecoded];
  int64_t begin = 0;
  do {
    const int64_t left = b.k - begin, count = left < kDecoded ? left : kDecoded;
    with_rows(b.stored->weight, b.stored->first + row, [&](const auto& rows) {
      for (int64_t j = 0; j < N; ++j) {
        rows.read(j, begin, begin + count, [&](int64_t at, const Lanes& some, auto) {
          store(numbers + j * kDecoded + at - begin, some);
        });
      }
    });
    const Block<float> part = {nullptr, b.x + begin, numbers,    nullptr,  b.tokens, N,
                               count,   0,           b.x_stride, kDecoded, nullptr};
    add_tiles<N>(part, 0, {0, count / kLanes * kLanes, begin == 0}, sums);
    if (count % kLanes != 0) add_rest<N>(part, 0, sums);
    begin += kDecoded;
  } while (begin < b.k);
}

template <int N, typename T>
void rows_of(const Block<T>& b, int64_t row) {
  Lanes sums[kBlockTokens * N];  // [tokens, N]
  if (b.stored == nullptr) {
    sum_rows<N>(b, row, sums);
  } else {
    sum_stored_rows<N>(b, row, sums);
  }
  write_sums<N>(b, row, sums);
}

template <typename T>
void block_of(const Block<T>& b) {
  int64_t row = 0;
  for (; row + kTileRows <= b.n; row += kTileRows) rows_of<kTileRows>(b, row);
  for (; row < b.n; ++row) rows_of<1>(b, row);
}

// out[j] = x . row + j of a weight that is not dense, for `count` rows.
void stored_dots(const float* x, const LinearBlock& b, int64_t row, int64_t count, float* out) {
  with_rows(b.weight, b.first + row, [&](const auto& rows) {
    for (int64_t j = 0; j < count; ++j) {
      Lanes sum = splat(0.0f);
      rows.read(j, 0, b.weight.k, [&](int64_t at, const Lanes& numbers, auto load) {
        sum = fma(load(x + at), numbers, sum);
      });
      reduce<1>(&sum, out + j);
    }
  });
}

// Reading the weights is the work, and one stream is read fastest.
template <typename T>
void lone_token(const Block<T>& b) {
  for (int64_t row = 0; row < b.n; row += kLanes) {
    const int64_t count = row + kLanes < b.n ? kLanes : b.n - row;
    float dots[kLanes] = {};
    if (b.stored != nullptr) stored_dots(b.x, *b.stored, row, count, dots);
    for (int64_t j = 0; b.stored == nullptr && j < count; ++j) {
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
  const bool is_dense = w.format == WeightFormat::kDense;
  with_type(b.dtype, [&](auto element) {
    using T = decltype(element);
    const T* const bias = static_cast<const T*>(b.bias);
    linear_of<T>({static_cast<T*>(b.out) + b.first, b.x,
                  is_dense ? static_cast<const T*>(w.data) + b.first * w.stride : nullptr,
                  bias != nullptr ? bias + b.first : nullptr, b.tokens, b.rows, w.k, b.out_stride,
                  b.x_stride, w.stride, is_dense ? nullptr : &b});
  });
}

void read_row(const Weight& w, int64_t row, void* out, DType dtype) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    T* const to = static_cast<T*>(out);
    with_rows(w, row, [&](const auto& rows) {
      rows.read(0, 0, w.k, [&](int64_t at, const Lanes& numbers, auto) {
        const int64_t left = w.k - at;
        if (left >= kLanes) {
          store(to + at, numbers);
        } else {
          store_some(to + at, numbers, left);
        }
      });
    });
  });
}

}  // namespace photon::cpu::PHOTON_ISA
