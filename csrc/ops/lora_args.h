// What the ops of adapters have in common: slots, and the two halves of an adapter.
#pragma once
#include "common/lora.h"
#include "ops/checks.h"

namespace photon::ops {

struct SlotArgs {
  Arg decode_meta, row_state;

  SlotArgs(Args& arg, const Tensor& decode_meta_, const Tensor& row_state_, int64_t tokens)
      : decode_meta(arg("decode_meta", decode_meta_)
                        .int32()
                        .shape({tokens, kMetaColumns}, "[tokens of x, 4]")
                        .contiguous()),
        row_state(arg("row_state", row_state_)
                      .int32()
                      .shape({Arg::kAny, kRowColumns}, "[rows, 32]")
                      .contiguous()) {}

  TokenSlots slots(int64_t count) const {
    return {decode_meta.data<int32_t>(), row_state.data<int32_t>(), row_state.size(0), count};
  }
};

struct ShrinkArgs {
  Arg x, a, out;
  SlotArgs given;
  OptionalArg norm_weight;

  // `out_name`: what the op calls the tensor that it writes.
  ShrinkArgs(Args& arg, const char* out_name, const Tensor& out_, const Tensor& x_,
             const Tensor& a_, const Tensor& decode_meta_, const Tensor& row_state_,
             const std::optional<Tensor>& norm_weight_);
  LoraShrinkParams params(double eps, bool pdl) const;
};

struct ExpandArgs {
  Arg h, b, out;
  SlotArgs given;
  int64_t parts, first_rows;

  ExpandArgs(Args& arg, const char* out_name, const Tensor& out_, const Tensor& h_,
             const Tensor& b_, const Tensor& decode_meta_, const Tensor& row_state_,
             int64_t first_rows);
  LoraExpandParams params(bool pdl) const;
};

}  // namespace photon::ops
