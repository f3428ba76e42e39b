// Adapters as the linears that they are: for each run of tokens with the same slot, those of its
// matrices.
#include "cpu/lora.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cpu/kernels.h"
#include "cpu/rounding.h"
#include "cpu/scratch.h"

namespace photon::cpu {
namespace {

// Calls body(slot, first token, number of tokens) for each run of tokens of one slot.
template <typename Body>
void for_runs(const TokenSlots& slots, int64_t tokens, const Body& body) {
  int64_t begin = 0;
  while (begin < tokens) {
    const int32_t slot = slot_of(slots, begin);
    int64_t end = begin + 1;
    while (end < tokens && slot_of(slots, end) == slot) ++end;
    if (slot > 0) body(slot, begin, end - begin);
    begin = end;
  }
}

constexpr int64_t kSize = size_of(DType::kBF16);

// h of all tokens that have a slot, [tokens, parts * rank], in the calling thread's scratch.
const void* link_h(const LoraLinkParams& p) {
  thread_local Scratch scratch, sums;
  const int64_t width = p.parts * p.rank, words = width + kLinkSpare;
  char* const h = reinterpret_cast<char*>(scratch.floats(p.tokens * width));
  float* const sum = sums.floats(words);
  for (int64_t i = 0; i < p.tokens; ++i) {
    if (slot_of(p.slots, i) == 0) continue;
    std::fill_n(sum, words, 0.0f);
    for (int64_t chunk = 0; chunk < p.before_chunks; ++chunk) {
      const float* const from = p.before + (chunk * p.tokens + i) * words;
      for (int64_t j = 0; j < words; ++j) sum[j] += from[j];
    }
    const float scale = p.normalizes ? 1.0f / std::sqrt(sum[width] + p.eps) : 1.0f;
    for (int64_t j = 0; j < width; ++j) sum[j] *= scale;
    round_to(h + i * width * kSize, sum, width, DType::kBF16);
  }
  return h;
}

// [tokens, n], in the calling thread's scratch: with act, x is not written.
void* copy_of_x(const LoraLinkParams& p) {
  thread_local Scratch scratch;
  char* const copy = reinterpret_cast<char*>(scratch.floats(p.tokens * p.n));
  for (int64_t i = 0; i < p.tokens; ++i)
    std::memcpy(copy + i * p.n * kSize, static_cast<char*>(p.x) + i * p.x_stride * kSize,
                static_cast<size_t>(p.n * kSize));
  return copy;
}

// The sums of a token over one chunk, `width` values from `x` on.
void leave_sums(const LoraLinkParams& p, float* out, const char* x, const char* a, const char* gain,
                int64_t width) {
  thread_local Scratch scratch;
  float* const values = scratch.floats((p.rows + 2) * kLinkColumns);
  float *const gains = values + kLinkColumns, *const rows = gains + kLinkColumns;
  simd().to_float(values, x, width, DType::kBF16);
  if (gain != nullptr) {
    out[p.rows] = std::inner_product(values, values + width, values, 0.0f) /
                  static_cast<float>(link_width(p));
    simd().to_float(gains, gain, width, DType::kBF16);
    for (int64_t i = 0; i < width; ++i) gains[i] *= values[i];
    round_to(rows, gains, width, DType::kBF16);
    simd().to_float(values, rows, width, DType::kBF16);
  }
  for (int64_t i = 0; i < p.rows; ++i)
    simd().to_float(rows + i * kLinkColumns, a + i * link_width(p) * kSize, width, DType::kBF16);
  simd().linear({out, values, dense_weight(rows, p.rows, width, kLinkColumns), nullptr, 1, 0,
                 p.rows, p.rows, kLinkColumns, DType::kF32});
}

}  // namespace

void lora_shrink(const LoraShrinkParams& p) {
  const int64_t size = size_of(p.dtype);
  for_runs(p.slots, p.tokens, [&](int32_t slot, int64_t first, int64_t count) {
    void* const out = static_cast<char*>(p.out) + first * p.out_stride * size;
    const void* const x = static_cast<const char*>(p.x) + first * p.x_stride * size;
    const void* const a = static_cast<const char*>(p.a) + (slot - 1) * p.a_slot_stride * size;
    LinearParams one{};
    one.out = out;
    one.x = x;
    one.weight = dense_weight(a, p.rows, p.k, p.a_stride);
    one.tokens = count;
    one.out_stride = p.out_stride;
    one.x_stride = p.x_stride;
    one.dtype = p.dtype;
    linear(one);
  });
}

void lora_expand(const LoraExpandParams& p) {
  const int64_t size = size_of(p.dtype);
  for_runs(p.slots, p.tokens, [&](int32_t slot, int64_t first, int64_t count) {
    int64_t row = 0;
    for (int64_t part = 0; part < p.parts; ++part) {
      const int64_t rows = part == 0 ? p.first_rows : p.other_rows;
      void* const out = static_cast<char*>(p.out) + (first * p.out_stride + row) * size;
      const void* const h =
          static_cast<const char*>(p.h) + (first * p.h_stride + part * p.rank) * size;
      const void* const b =
          static_cast<const char*>(p.b) + ((slot - 1) * p.b_slot_stride + row * p.b_stride) * size;
      LinearParams one{};
      one.residual = out;
      one.x = h;
      one.weight = dense_weight(b, rows, p.rank, p.b_stride);
      one.tokens = count;
      one.residual_stride = p.out_stride;
      one.x_stride = p.h_stride;
      one.epilogue = Epilogue::kAdd;
      one.dtype = p.dtype;
      linear(one);
      row += rows;
    }
  });
}

void lora_link(const LoraLinkParams& p) {
  const int64_t width = link_width(p);
  void* x = p.x;
  int64_t x_stride = p.x_stride;
  if (p.act != nullptr) {
    x = copy_of_x(p);
    x_stride = p.n;
  }
  if (p.b != nullptr) {
    lora_expand({x, link_h(p), p.b, p.slots, p.tokens, p.n, p.rank, x_stride, p.parts * p.rank,
                 p.b_slot_stride, p.rank, p.parts, p.first_rows, p.other_rows, DType::kBF16});
  }
  if (p.act != nullptr) silu_mul({p.act, x, p.tokens, width, p.act_stride, x_stride, DType::kBF16});
  if (p.a == nullptr) return;
  const char* const from = static_cast<const char*>(p.act != nullptr ? p.act : p.x);
  const int64_t stride = p.act != nullptr ? p.act_stride : p.x_stride;
  const char* const gain = static_cast<const char*>(p.norm_weight);
  for (int64_t i = 0; i < p.tokens; ++i) {
    const int32_t slot = slot_of(p.slots, i);
    if (slot == 0) continue;
    const char* const a = static_cast<const char*>(p.a) + (slot - 1) * p.a_slot_stride * kSize;
    for (int64_t chunk = 0; chunk < link_chunks(width); ++chunk) {
      const int64_t first = chunk * kLinkColumns;
      leave_sums(p, p.after + (chunk * p.tokens + i) * (p.rows + kLinkSpare),
                 from + (i * stride + first) * kSize, a + first * kSize,
                 gain == nullptr ? nullptr : gain + first * kSize,
                 std::min(kLinkColumns, width - first));
    }
  }
}

}  // namespace photon::cpu
