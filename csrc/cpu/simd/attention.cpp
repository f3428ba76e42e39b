// Attention of one token over its context: an online softmax over blocks of positions, counted from
// 0, so that the order of every sum depends on the length alone (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018).
#include <type_traits>

#include "common/params.h"
#include "cpu/simd/dot.h"
#include "cpu/simd/functions.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

constexpr int kBlock = 128;     // positions whose scores are in hand at once
constexpr int kGroupHeads = 4;  // query heads that share one read of keys and values
constexpr int kSlices = 4;      // vectors of 16 output elements that are accumulated in registers

#if defined(__AVX512F__)
constexpr int kTilePositions = 4;
#else
constexpr int kTilePositions = 2;
#endif

// Keys and values in fp8 have a scale each, which scores and weights are multiplied by.
template <typename Kv>
constexpr bool kScaled = std::is_same_v<Kv, E4M3>;

template <typename Kv>
struct Tokens {
  const Kv* k[kBlock];
  const Kv* v[kBlock];
  float k_scale[kBlock], v_scale[kBlock];  // where kScaled
  int count;
};

// Where the keys and values of positions begin .. end - 1 are, kBlock of them at most; those in
// pages that are none are left out.
template <typename Kv>
void gather(const KvContext& context, int64_t begin, int64_t end, Tokens<Kv>& tokens) {
  tokens.count = 0;
  for (int64_t position = begin; position < end;) {
    const int64_t slot = position / context.page_size, offset = position % context.page_size;
    const int64_t page = context.pages[slot], rest = context.page_size - offset,
                  run = rest < end - position ? rest : end - position;
    position += run;
    if (page < 0 || page >= context.num_pages) continue;
    const Kv* k = static_cast<const Kv*>(context.k) + page * context.k_page_stride +
                  offset * context.k_token_stride;
    const Kv* v = static_cast<const Kv*>(context.v) + page * context.v_page_stride +
                  offset * context.v_token_stride;
    const int64_t scale = page * context.scale_page_stride + offset;
    for (int64_t i = 0; i < run; ++i) {
      if constexpr (kScaled<Kv>) {
        tokens.k_scale[tokens.count] = context.k_scale[scale + i];
        tokens.v_scale[tokens.count] = context.v_scale[scale + i];
      }
      tokens.k[tokens.count] = k + i * context.k_token_stride;
      tokens.v[tokens.count++] = v + i * context.v_token_stride;
    }
  }
}

template <int H>
struct Softmax {
  float q[H][kMaxHeadDim];
  float sums[H][kMaxHeadDim];  // of weights times values
  float scores[H][kBlock];
  float top[H], total[H], fade[H];
};

template <typename Kv, int H, int N>
PHOTON_INLINE void score_tile(const Tokens<Kv>& tokens, int at, int64_t head_dim, float scale,
                              Softmax<H>& s) {
  const Kv* rows[N];
  float dots[H * N];
  PHOTON_UNROLL
  for (int j = 0; j < N; ++j) rows[j] = tokens.k[at + j];
  dot_tile<Kv, H, N>(s.q[0], kMaxHeadDim, rows, head_dim, 0, dots);
  PHOTON_UNROLL
  for (int h = 0; h < H; ++h) {
    PHOTON_UNROLL
    for (int j = 0; j < N; ++j) {
      s.scores[h][at + j] = dots[h * N + j] * scale;
      if constexpr (kScaled<Kv>) s.scores[h][at + j] *= tokens.k_scale[at + j];
    }
  }
}

// Scores become weights exp(score - top); `fade` is what the earlier blocks' sums are to be
// multiplied with.
template <int H>
void weigh(int count, Softmax<H>& s) {
  for (int h = 0; h < H; ++h) {
    const int padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int i = count; i < padded; ++i) s.scores[h][i] = -__builtin_inff();
    Lanes best = splat(s.top[h]);
    for (int i = 0; i < padded; i += kLanes) best = max(load(s.scores[h] + i), best);
    const float top = max_lane(best);
    Lanes total = splat(0.0f);
    for (int i = 0; i < padded; i += kLanes) {
      const Lanes weights = exp(load(s.scores[h] + i) - splat(top));
      store(s.scores[h] + i, weights);
      total = total + weights;
    }
    s.fade[h] = exp(splat(s.top[h] - top)).part[0][0];
    s.total[h] = s.total[h] * s.fade[h] + sum(total);
    s.top[h] = top;
  }
}

// Weights of values become weights of their bytes.
template <typename Kv, int H>
void scale_weights(const Tokens<Kv>& tokens, Softmax<H>& s) {
  for (int h = 0; h < H; ++h) {
    for (int t = 0; t < tokens.count; ++t) s.scores[h][t] *= tokens.v_scale[t];
  }
}

// sums[:, at ...] = sums * fade + weights . values, S vectors wide; `some` elements of the last one
// where it is not whole.
template <typename Kv, int H, int S, bool kWhole>
PHOTON_INLINE void add_slices(const Tokens<Kv>& tokens, int64_t at, int64_t some, Softmax<H>& s) {
  Lanes acc[H * S];
  PHOTON_UNROLL
  for (int h = 0; h < H; ++h) {
    PHOTON_UNROLL
    for (int i = 0; i < S; ++i)
      acc[h * S + i] = load(s.sums[h] + at + i * kLanes) * splat(s.fade[h]);
  }
  for (int t = 0; t < tokens.count; ++t) {
    const Kv* const from = tokens.v[t] + at;
    Lanes value[S];
    PHOTON_UNROLL
    for (int i = 0; i < S; ++i)
      value[i] = kWhole ? load(from + i * kLanes) : load_some(from + i * kLanes, some);
    PHOTON_UNROLL
    for (int h = 0; h < H; ++h) {
      const Lanes weight = splat(s.scores[h][t]);
      PHOTON_UNROLL
      for (int i = 0; i < S; ++i) acc[h * S + i] = fma(weight, value[i], acc[h * S + i]);
    }
  }
  PHOTON_UNROLL
  for (int h = 0; h < H; ++h) {
    PHOTON_UNROLL
    for (int i = 0; i < S; ++i) store(s.sums[h] + at + i * kLanes, acc[h * S + i]);
  }
}

template <typename Kv, int H>
void add_values(const Tokens<Kv>& tokens, int64_t head_dim, Softmax<H>& s) {
  int64_t at = 0;
  for (; at + kSlices * kLanes <= head_dim; at += kSlices * kLanes)
    add_slices<Kv, H, kSlices, true>(tokens, at, 0, s);
  for (; at + kLanes <= head_dim; at += kLanes) add_slices<Kv, H, 1, true>(tokens, at, 0, s);
  if (at < head_dim) add_slices<Kv, H, 1, false>(tokens, at, head_dim - at, s);
}

template <typename T, typename Kv, int H>
void attend_heads(const AttendGroup& g, int64_t first) {
  Softmax<H> s;
  for (int h = 0; h < H; ++h) {
    to_float(s.q[h], static_cast<const T*>(g.q) + (first + h) * g.q_head_stride, g.head_dim,
             g.dtype);
    for (float& sum : s.sums[h]) sum = 0.0f;
    s.top[h] = -__builtin_inff();
    s.total[h] = 0.0f;
  }
  const int64_t room = g.context.row_pages * g.context.page_size,
                length = g.length < room ? g.length : room;
  Tokens<Kv> tokens;
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    gather(g.context, begin, begin + kBlock < length ? begin + kBlock : length, tokens);
    if (tokens.count == 0) continue;
    int at = 0;
    for (; at + kTilePositions <= tokens.count; at += kTilePositions)
      score_tile<Kv, H, kTilePositions>(tokens, at, g.head_dim, g.scale, s);
    for (; at < tokens.count; ++at) score_tile<Kv, H, 1>(tokens, at, g.head_dim, g.scale, s);
    weigh(tokens.count, s);
    if constexpr (kScaled<Kv>) scale_weights(tokens, s);
    add_values(tokens, g.head_dim, s);
  }
  for (int h = 0; h < H; ++h) {
    const Lanes total = splat(s.total[h] == 0.0f ? 1.0f : s.total[h]);  // nothing was read: zeros
    T* const out = static_cast<T*>(g.out) + (first + h) * g.out_head_stride;
    for_lanes(g.head_dim, [&](int64_t i, const auto&, const auto& put) {
      put(out + i, load(s.sums[h] + i) / total);
    });
  }
}

template <typename T, typename Kv>
void attend_of(const AttendGroup& g) {
  for (int64_t first = 0; first < g.heads; first += kGroupHeads) {
    switch (g.heads - first) {
      case 1:
        attend_heads<T, Kv, 1>(g, first);
        break;
      case 2:
        attend_heads<T, Kv, 2>(g, first);
        break;
      case 3:
        attend_heads<T, Kv, 3>(g, first);
        break;
      default:
        attend_heads<T, Kv, kGroupHeads>(g, first);
    }
  }
}

template <typename T>
void rotate_of(const RotateHead& r) {
  const int64_t d = r.head_dim, half = d / 2;
  float x[kMaxHeadDim + kLanes], turned[kMaxHeadDim + kLanes];
  T normed[kMaxHeadDim];
  const T* in = static_cast<const T*>(r.in);
  if (r.norm != nullptr) {
    rms_norm({normed, nullptr, in, r.norm, d, r.eps, r.dtype});
    in = normed;
  }
  to_float(x, in, d, r.dtype);
  for_lanes(half, [&](int64_t i, const auto& get, const auto& put) {
    const Lanes low = get(x + i), high = get(x + half + i);
    put(turned + i, fma(low, get(r.cos + i), splat(0.0f) - high * get(r.sin + i)));
    put(turned + half + i, fma(high, get(r.cos + half + i), low * get(r.sin + half + i)));
  });
  T* const out = static_cast<T*>(r.out);
  for_lanes(d, [&](int64_t i, const auto&, const auto& put) { put(out + i, load(turned + i)); });
}

}  // namespace

void rotate(const RotateHead& head) {
  with_type(head.dtype, [&](auto element) { rotate_of<decltype(element)>(head); });
}

void attend(const AttendGroup& group) {
  with_type(group.dtype, [&](auto element) {
    using T = decltype(element);
    if (group.context.k_scale != nullptr) return attend_of<T, E4M3>(group);
    attend_of<T, T>(group);
  });
}

}  // namespace photon::cpu::PHOTON_ISA
