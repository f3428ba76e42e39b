// lora_shrink_into, lora_expand_: the two halves of an adapter, by the slot of each token's row.
#include "common/lora.h"

#include "cpu/lora.h"
#include "cuda/lora.h"
#include "ops/dispatch.h"

namespace photon::ops {
namespace {

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

void lora_shrink(const Tensor& out_, const Tensor& x_, const Tensor& a_, const Tensor& decode_meta_,
                 const Tensor& row_state_, const std::optional<Tensor>& norm_weight_, double eps,
                 bool pdl) {
  Args arg("lora_shrink_into");
  const Arg x = arg("x", x_).floating().rank(2, "[tokens, k]").last_contiguous();
  const Arg a = arg("a", a_)
                    .dtype_of(x)
                    .shape({Arg::kAny, Arg::kAny, x.size(1)}, "[slots, rows, k of x]")
                    .last_contiguous();
  const Arg out = arg("out", out_)
                      .dtype_of(x)
                      .shape({x.size(0), a.size(1)}, "[tokens of x, rows of a]")
                      .last_contiguous();
  const SlotArgs given(arg, decode_meta_, row_state_, x.size(0));
  const OptionalArg norm_weight = arg("norm_weight", norm_weight_);
  if (norm_weight) norm_weight->dtype_of(x).shape({x.size(1)}, "[k of x]").contiguous();
  out.written({&x, &a, &given.decode_meta, &given.row_state, norm_weight.get()});

  LoraShrinkParams p{};
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.norm_weight = norm_weight.data<void>();
  p.a = a.data<void>();
  p.slots = given.slots(a.size(0));
  p.tokens = x.size(0);
  p.rows = a.size(1);
  p.k = x.size(1);
  p.out_stride = out.stride(0);
  p.x_stride = x.stride(0);
  p.a_slot_stride = a.stride(0);
  p.a_stride = a.stride(1);
  p.eps = check_epsilon(out.op(), eps);
  p.pdl = pdl;
  p.dtype = x.dtype();
  PHOTON_DISPATCH(lora_shrink, out, p);
}

void lora_expand(const Tensor& out_, const Tensor& h_, const Tensor& b_, const Tensor& decode_meta_,
                 const Tensor& row_state_, int64_t first_rows, bool pdl) {
  Args arg("lora_expand_");
  const Arg h = arg("h", h_).floating().rank(2, "[tokens, parts x rank]").last_contiguous();
  const Arg b = arg("b", b_).dtype_of(h).rank(3, "[slots, n, rank]").last_contiguous();
  const Arg out = arg("out", out_)
                      .dtype_of(h)
                      .shape({h.size(0), b.size(1)}, "[tokens of h, n of b]")
                      .last_contiguous();
  const SlotArgs given(arg, decode_meta_, row_state_, h.size(0));
  out.written({&h, &b, &given.decode_meta, &given.row_state});
  const int64_t n = b.size(1), rank = b.size(2);
  const int64_t parts = rank > 0 && h.size(1) % rank == 0 ? h.size(1) / rank : 0;
  if (parts == 0)
    fail(arg.op(), "h has ", h.size(1), " columns, expected a multiple of the rank of b, ", rank);
  const int64_t others = parts - 1, rest = n - first_rows;
  if (first_rows < 0 || rest < 0 || (others == 0 ? rest != 0 : rest % others != 0))
    fail(arg.op(), "first_rows is ", first_rows, ", expected so many of the ", n,
         " rows of b that the rest is ", others, " equal parts");

  LoraExpandParams p{};
  p.out = out.data<void>();
  p.h = h.data<void>();
  p.b = b.data<void>();
  p.slots = given.slots(b.size(0));
  p.tokens = h.size(0);
  p.n = n;
  p.rank = rank;
  p.out_stride = out.stride(0);
  p.h_stride = h.stride(0);
  p.b_slot_stride = b.stride(0);
  p.b_stride = b.stride(1);
  p.parts = parts;
  p.first_rows = first_rows;
  p.other_rows = others > 0 ? rest / others : 0;
  p.pdl = pdl;
  p.dtype = h.dtype();
  PHOTON_DISPATCH(lora_expand, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("lora_shrink_into", TORCH_BOX(&lora_shrink));
  m.impl("lora_expand_", TORCH_BOX(&lora_expand));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
