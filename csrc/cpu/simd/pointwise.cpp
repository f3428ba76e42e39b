// Conversions, RMS norm, sums, SiLU and argmax: one pass or two over a token.
#include "cpu/simd/functions.h"

namespace photon::cpu::PHOTON_ISA {
namespace {

template <typename T>
void to_float_of(float* to, const T* from, int64_t n) {
  for_lanes(n, [&](int64_t i, const auto& get, const auto& put) { put(to + i, get(from + i)); });
}

template <typename T>
void rms_norm_of(const NormToken& token) {
  T* const out = static_cast<T*>(token.out);
  T* const residual = static_cast<T*>(token.residual);
  const T* const x = static_cast<const T*>(token.x);
  const T* const weight = static_cast<const T*>(token.weight);
  Lanes squares = splat(0.0f);
  for_lanes(token.size, [&](int64_t i, const auto& get, const auto& put) {
    Lanes v = get(x + i);
    if (residual != nullptr) {
      v = rounded_to(x, get(residual + i) + v);
      put(residual + i, v);
    }
    squares = fma(v, v, squares);
  });
  const T* const from = residual != nullptr ? residual : x;
  const Lanes scale =
      splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(token.size) + token.eps));
  for_lanes(token.size, [&](int64_t i, const auto& get, const auto& put) {
    put(out + i, get(weight + i) * rounded_to(x, get(from + i) * scale));
  });
}

template <typename T>
void add_of(T* to, const T* x, int64_t n) {
  for_lanes(n, [&](int64_t i, const auto& get, const auto& put) {
    put(to + i, get(to + i) + get(x + i));
  });
}

template <typename T>
void silu_mul_of(T* out, const T* gate, const T* up, int64_t n) {
  for_lanes(n, [&](int64_t i, const auto& get, const auto& put) {
    const Lanes g = get(gate + i), one = splat(1.0f);
    put(out + i, rounded_to(gate, g / (one + exp(splat(0.0f) - g))) * get(up + i));
  });
}

template <typename T>
Candidate argmax_of(const T* values, int64_t n) {
  const float lowest = -__builtin_inff();
  Lanes best = splat(lowest);
  IntPart where[kParts], index[kParts];
  for (int l = 0; l < kLanes; ++l) {
    where[l / kWidth][l % kWidth] = -1;
    index[l / kWidth][l % kWidth] = l;
  }
  const auto take = [&](const Lanes& v) {
    for (int p = 0; p < kParts; ++p) {
      const auto better = v.part[p] > best.part[p];  // false for NaN; equals keep the earlier id
      best.part[p] = better ? v.part[p] : best.part[p];
      where[p] = better ? index[p] : where[p];
      index[p] += kLanes;
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) take(load(values + i));
  if (i < n) {
    Lanes rest = load_some(values + i, n - i);
    for (int64_t l = n - i; l < kLanes; ++l) rest.part[l / kWidth][l % kWidth] = lowest;
    take(rest);
  }
  Candidate found = {lowest, -1};
  for (int l = 0; l < kLanes; ++l) {
    const float value = best.part[l / kWidth][l % kWidth];
    const int32_t id = where[l / kWidth][l % kWidth];
    if (id >= 0 && (value > found.value || (value == found.value && id < found.id)))
      found = {value, id};
  }
  return found;
}

}  // namespace

void to_float(float* to, const void* from, int64_t n, DType dtype) {
  with_type(dtype,
            [&](auto element) { to_float_of(to, static_cast<const decltype(element)*>(from), n); });
}

void rms_norm(const NormToken& token) {
  with_type(token.dtype, [&](auto element) { rms_norm_of<decltype(element)>(token); });
}

void add(void* to, const void* x, int64_t n, DType dtype) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    add_of(static_cast<T*>(to), static_cast<const T*>(x), n);
  });
}

void silu_mul(void* out, const void* gate, const void* up, int64_t n, DType dtype) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    silu_mul_of(static_cast<T*>(out), static_cast<const T*>(gate), static_cast<const T*>(up), n);
  });
}

Candidate argmax(const void* values, int64_t n, DType dtype) {
  Candidate found = {};
  with_type(dtype, [&](auto element) {
    found = argmax_of(static_cast<const decltype(element)*>(values), n);
  });
  return found;
}

}  // namespace photon::cpu::PHOTON_ISA
