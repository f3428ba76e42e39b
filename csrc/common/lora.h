// Adapters: low-rank updates of a linear's weight, one for each slot, chosen by a token's row. Slot
// 0 is no adapter and has no memory; slot s is matrix s - 1 of a stack.
#pragma once
#include "gpu.h"
#include "row_state.h"
#include "token.h"

namespace photon {

// Which slot each token of a step has.
struct TokenSlots {
  const int32_t* decode_meta;  // [tokens, 4]
  const int32_t* row_state;    // [rows, kRowColumns]
  int64_t rows, slots;
};

// 0: the token is dead, its row has no adapter, or row or slot cannot be.
PHOTON_HOST_DEVICE inline int32_t slot_of(const TokenSlots& s, int64_t token) {
  const Token own = load_token(s.decode_meta, token);
  if (own.length <= 0 || own.row < 0 || own.row >= s.rows) return 0;
  const int32_t slot = s.row_state[static_cast<int64_t>(own.row) * kRowColumns + kRowLoraSlot];
  return slot > 0 && slot <= s.slots ? slot : 0;
}

// Tokens of no slot are left as they are, by all ops.
struct LoraShrinkParams {
  void* out;      // [tokens, rows]
  const void* x;  // [tokens, k]
  const void* a;  // [slots, rows, k]
  TokenSlots slots;
  int64_t tokens, rows, k, out_stride, x_stride, a_slot_stride, a_stride;
  DType dtype;
};

struct LoraExpandParams {
  void* out;      // [tokens, n] += the product, rounded before it is added
  const void* h;  // [tokens, parts * rank]
  const void* b;  // [slots, n, rank]: rows of part 0, then those of the others
  TokenSlots slots;
  int64_t tokens, n, rank, out_stride, h_stride, b_slot_stride, b_stride;
  int64_t parts, first_rows, other_rows;  // rows of part 0, and of each other
  DType dtype;
};

// lora_link: the second half of one linear's update and the first half of the next one's, by the
// same CTAs, which have some columns each. So what an A makes of a token stays in parts: its sums
// over kLinkColumns columns each, which whoever needs them adds up in order.
constexpr int64_t kLinkColumns = 256;
constexpr int64_t kLinkSpare = 4;  // words behind a token's sums; the first: its mean square's part

constexpr int64_t link_chunks(int64_t columns) {
  return (columns + kLinkColumns - 1) / kLinkColumns;
}

constexpr int64_t kLinkVector = 8;  // elements of 16 bytes

// Why it does not take tensors of this dtype and width: all are bfloat16 but the sums; widths and
// ranks, pointers and strides are whole vectors.
inline Unsupported link_unsupported(DType dtype, int64_t width) {
  if (dtype != DType::kBF16) return {kNotBf16};
  if (width % kLinkVector != 0) return {"a width is no multiple of 8", width};
  return {};
}

struct LoraLinkParams {
  void* x;    // [tokens, n] += the product with B, rounded, if there is one; and multiplied by A
  void* act;  // or, where set, [tokens, n / 2] = silu(gate) * up of that, and x is only read
  TokenSlots slots;
  int64_t tokens, n, x_stride, act_stride;

  const void* b;        // or null; [slots, n, rank], the parts one below the other
  const float* before;  // [before_chunks, tokens, parts * rank + kLinkSpare]
  int64_t rank, b_slot_stride;
  int64_t parts, first_rows, other_rows;  // as above; with act, gate and up are two equal ones
  int64_t before_chunks;
  float eps;
  bool normalizes;  // the sums of `before` are of what was to be normalized: with eps

  const void* a;            // or null; [slots, rows, width of what is multiplied]
  const void* norm_weight;  // or null: it is multiplied by this first, and squares are added up
  float* after;             // [chunks of that width, tokens, rows + kLinkSpare]
  int64_t rows, a_slot_stride;

  bool pdl;  // it may start while the kernels before it still run, and read slots and weights
};

// The width of what A multiplies, and of what the CTAs divide.
PHOTON_HOST_DEVICE inline int64_t link_width(const LoraLinkParams& p) {
  return p.act != nullptr ? p.n / 2 : p.n;
}

}  // namespace photon
