// Adapters: low-rank updates of a linear's weight, one for each slot, chosen by a token's row. Slot
// 0 is no adapter and has no memory; slot s is matrix s - 1 of a stack.
#pragma once
#include "dtype.h"
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

// Tokens of no slot are left as they are, by both ops.
struct LoraShrinkParams {
  void* out;                // [tokens, rows]
  const void* x;            // [tokens, k]
  const void* norm_weight;  // [k] or null: x is normalized first
  const void* a;            // [slots, rows, k]
  TokenSlots slots;
  int64_t tokens, rows, k, out_stride, x_stride, a_slot_stride, a_stride;
  float eps;
  bool pdl;  // here and below: it may start while the kernels before it still run, and read slots
  DType dtype;
};

struct LoraExpandParams {
  void* out;      // [tokens, n] += the product, rounded before it is added
  const void* h;  // [tokens, parts * rank]
  const void* b;  // [slots, n, rank]: rows of part 0, then those of the others
  TokenSlots slots;
  int64_t tokens, n, rank, out_stride, h_stride, b_slot_stride, b_stride;
  int64_t parts, first_rows, other_rows;  // rows of part 0, and of each other
  bool pdl;
  DType dtype;
};

}  // namespace photon
