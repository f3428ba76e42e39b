// Adapters as the linears that they are: for each run of tokens with the same slot, those of its
// matrices.
#include "cpu/lora.h"

#include "cpu/kernels.h"

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

}  // namespace

void lora_shrink(const LoraShrinkParams& p) {
  const int64_t size = size_of(p.dtype);
  for_runs(p.slots, p.tokens, [&](int32_t slot, int64_t first, int64_t count) {
    void* const out = static_cast<char*>(p.out) + first * p.out_stride * size;
    const void* const x = static_cast<const char*>(p.x) + first * p.x_stride * size;
    const void* const a = static_cast<const char*>(p.a) + (slot - 1) * p.a_slot_stride * size;
    if (p.norm_weight == nullptr) {
      linear({out, x, a, nullptr, nullptr, count, p.rows, p.k, p.out_stride, p.x_stride, p.a_stride,
              p.dtype});
    } else {
      norm_linear({out, x, p.norm_weight, a, nullptr, nullptr, nullptr, count, p.rows, p.k,
                   p.out_stride, p.x_stride, p.a_stride, p.eps, false, false, p.dtype});
    }
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
      linear_residual({out, h, b, nullptr, nullptr, count, rows, p.rank, p.out_stride, p.h_stride,
                       p.b_stride, false, false, p.dtype});
      row += rows;
    }
  });
}

}  // namespace photon::cpu
