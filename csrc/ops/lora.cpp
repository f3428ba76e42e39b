// lora_shrink_into, lora_expand_: the two halves of an adapter, by the slot of each token's row;
// and lora_link_, which has those of two neighbouring linears.
#include "common/lora.h"

#include <algorithm>

#include "cpu/lora.h"
#include "cuda/lora/lora.h"
#include "ops/dispatch.h"
#include "ops/tables.h"

namespace photon::ops {
namespace {

struct SlotArgs {
  Arg decode_meta, row_state;

  SlotArgs(Args& arg, const Tensor& decode_meta_, const Tensor& row_state_, int64_t tokens)
      : decode_meta(meta_of(arg, decode_meta_, tokens, "[tokens of x, 4]")),
        row_state(row_state_of(arg, row_state_, "[rows, 32]")) {}

  TokenSlots slots(int64_t count) const {
    return {decode_meta.data<int32_t>(), row_state.data<int32_t>(), row_state.size(0), count};
  }
};

// How the rows of b are divided into parts, each with `rank` of the columns of what is multiplied.
struct Parts {
  int64_t count, first_rows, other_rows;

  // `h` has `columns` columns; `spare` of them belong to no part.
  Parts(const Arg& h, int64_t columns, int64_t spare, const Arg& b, int64_t first)
      : count(0), first_rows(first) {
    const int64_t n = b.size(1), rank = b.size(2);
    if (rank > 0 && (columns - spare) % rank == 0) count = (columns - spare) / rank;
    if (count <= 0) {
      fail(h.op(), h.name(), " has ", columns, " columns, expected ",
           spare > 0 ? "4 more than " : "", "a multiple of the rank of b, ", rank);
    }
    const int64_t others = count - 1, rest = n - first;
    if (first < 0 || rest < 0 || (others == 0 ? rest != 0 : rest % others != 0))
      fail(h.op(), "first_rows is ", first, ", expected so many of the ", n,
           " rows of b that the rest is ", others, " equal parts");
    other_rows = others > 0 ? rest / others : 0;
  }
};

void lora_shrink(const Tensor& out_, const Tensor& x_, const Tensor& a_, const Tensor& decode_meta_,
                 const Tensor& row_state_) {
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
  out.written({&x, &a, &given.decode_meta, &given.row_state});

  LoraShrinkParams p{};
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.a = a.data<void>();
  p.slots = given.slots(a.size(0));
  p.tokens = x.size(0);
  p.rows = a.size(1);
  p.k = x.size(1);
  p.out_stride = out.stride(0);
  p.x_stride = x.stride(0);
  p.a_slot_stride = a.stride(0);
  p.a_stride = a.stride(1);
  p.dtype = x.dtype();
  PHOTON_DISPATCH(lora_shrink, out, p);
}

void lora_expand(const Tensor& out_, const Tensor& h_, const Tensor& b_, const Tensor& decode_meta_,
                 const Tensor& row_state_, int64_t first_rows) {
  Args arg("lora_expand_");
  const Arg h = arg("h", h_).floating().rank(2, "[tokens, parts x rank]").last_contiguous();
  const Arg b = arg("b", b_).dtype_of(h).rank(3, "[slots, n, rank]").last_contiguous();
  const Arg out = arg("out", out_)
                      .dtype_of(h)
                      .shape({h.size(0), b.size(1)}, "[tokens of h, n of b]")
                      .last_contiguous();
  const SlotArgs given(arg, decode_meta_, row_state_, h.size(0));
  out.written({&h, &b, &given.decode_meta, &given.row_state});
  const Parts parts(h, h.size(1), 0, b, first_rows);

  LoraExpandParams p{};
  p.out = out.data<void>();
  p.h = h.data<void>();
  p.b = b.data<void>();
  p.slots = given.slots(b.size(0));
  p.tokens = h.size(0);
  p.n = b.size(1);
  p.rank = b.size(2);
  p.out_stride = out.stride(0);
  p.h_stride = h.stride(0);
  p.b_slot_stride = b.stride(0);
  p.b_stride = b.stride(1);
  p.parts = parts.count;
  p.first_rows = parts.first_rows;
  p.other_rows = parts.other_rows;
  p.dtype = h.dtype();
  PHOTON_DISPATCH(lora_expand, out, p);
}

// What lora_link_ moves as 16-byte vectors.
void check_vectors(const Arg& arg, std::initializer_list<int64_t> sizes) {
  const bool is_aligned = is_vector_aligned(arg.data<void>());
  if (is_aligned && std::all_of(sizes.begin(), sizes.end(),
                                [](int64_t n) { return !link_unsupported(DType::kBF16, n); }))
    return;
  fail(arg.op(), arg.name(),
       " is not made of whole vectors: its address, width and strides have to be multiples of 16 "
       "bytes");
}

// A or B of all slots, whose rows follow each other in a slot.
Arg matrices(Args& arg, const char* name, const Tensor& tensor, int64_t slots, int64_t rows,
             int64_t columns, const char* meaning) {
  const Arg found = arg(name, tensor).bfloat16().shape({slots, rows, columns}, meaning);
  if (found.size(1) > 1 && (found.stride(2) != 1 || found.stride(1) != found.size(2)))
    fail(arg.op(), name, " has gaps within a slot, expected none");
  check_vectors(found, {found.size(2), found.stride(0)});
  return found;
}

void lora_link(const Tensor& x_, const Tensor& decode_meta_, const Tensor& row_state_,
               const std::optional<Tensor>& before_, const std::optional<Tensor>& b_,
               int64_t first_rows, std::optional<double> eps, const std::optional<Tensor>& act_,
               const std::optional<Tensor>& after_, const std::optional<Tensor>& a_,
               const std::optional<Tensor>& norm_weight_, bool pdl) {
  Args arg("lora_link_");
  if (before_.has_value() != b_.has_value() || after_.has_value() != a_.has_value())
    fail(arg.op(), "before goes with b, and after with a: give both or neither");
  if (act_ && !b_) fail(arg.op(), "act goes with b");
  const Arg x = arg("x", x_).bfloat16().rank(2, "[tokens, n]").last_contiguous();
  const int64_t tokens = x.size(0), n = x.size(1);
  check_vectors(x, {n, x.stride(0)});
  const SlotArgs given(arg, decode_meta_, row_state_, tokens);

  LoraLinkParams p{};
  p.x = x.data<void>();
  p.tokens = tokens;
  p.n = n;
  p.x_stride = x.stride(0);
  p.first_rows = n;
  int64_t slots = Arg::kAny;
  OptionalArg before, b, act;
  if (b_) {
    b = OptionalArg(matrices(arg, "b", *b_, slots, n, Arg::kAny, "[slots, n of x, rank]"));
    check_vectors(*b.get(), {b->size(2)});
    slots = b->size(0);
    before = OptionalArg(
        arg("before", *before_)
            .float32()
            .shape({Arg::kAny, tokens, Arg::kAny}, "[chunks, tokens of x, parts x rank + 4]")
            .contiguous());
    check_vectors(*before.get(), {});
    const Parts parts(*before.get(), before->size(2), kLinkSpare, *b.get(), first_rows);
    p.b = b->data<void>();
    p.before = before->data<float>();
    p.rank = b->size(2);
    p.b_slot_stride = b->stride(0);
    p.parts = parts.count;
    p.first_rows = parts.first_rows;
    p.other_rows = parts.other_rows;
    p.before_chunks = before->size(0);
    p.normalizes = eps.has_value();
    p.eps = check_epsilon(arg.op(), eps.value_or(0.0));
    check_vectors(x, {p.first_rows, p.other_rows});
  }
  if (act_) {
    if (p.parts != 2 || 2 * p.first_rows != n)
      fail(arg.op(), "act goes with two equal parts: gate, then up");
    act = OptionalArg(arg("act", *act_)
                          .bfloat16()
                          .shape({tokens, n / 2}, "[tokens of x, n / 2]")
                          .last_contiguous());
    check_vectors(*act.get(), {act->stride(0)});
    act->written({&x, &given.decode_meta, &given.row_state, before.get(), b.get()});
    p.act = act->data<void>();
    p.act_stride = act->stride(0);
  }
  if (a_) {
    if (!act && p.parts > 1) fail(arg.op(), "a follows one part, or act");
    const int64_t width = act ? n / 2 : n;
    const Arg a =
        matrices(arg, "a", *a_, slots, Arg::kAny, width, "[slots, rows, n of x or width of act]");
    slots = a.size(0);
    const Arg after = arg("after", *after_)
                          .float32()
                          .shape({link_chunks(width), tokens, a.size(1) + kLinkSpare},
                                 "[chunks of 256 columns, tokens of x, rows of a + 4]")
                          .contiguous();
    const OptionalArg norm_weight = arg("norm_weight", norm_weight_);
    if (norm_weight) {
      norm_weight->bfloat16().shape({width}, "[columns of a]").contiguous();
      check_vectors(*norm_weight.get(), {});
    }
    after.written({&x, &given.decode_meta, &given.row_state, before.get(), b.get(), act.get(), &a,
                   norm_weight.get()});
    p.a = a.data<void>();
    p.norm_weight = norm_weight.data<void>();
    p.after = after.data<float>();
    p.rows = a.size(1);
    p.a_slot_stride = a.stride(0);
  }
  if (b) x.written({&given.decode_meta, &given.row_state, before.get(), b.get()});
  p.slots = given.slots(slots);
  p.pdl = pdl;
  if (!b && !a_) return;
  PHOTON_DISPATCH(lora_link, x, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("lora_shrink_into", TORCH_BOX(&lora_shrink));
  m.impl("lora_expand_", TORCH_BOX(&lora_expand));
  m.impl("lora_link_", TORCH_BOX(&lora_link));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
