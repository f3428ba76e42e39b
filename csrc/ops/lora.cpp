// lora_shrink_into, lora_expand_: the two halves of an adapter, by the slot of each token's row.
#include "cpu/lora.h"
#include "cuda/lora.h"
#include "ops/dispatch.h"
#include "ops/lora_args.h"

namespace photon::ops {
namespace {

void lora_shrink(const Tensor& out_, const Tensor& x_, const Tensor& a_, const Tensor& decode_meta_,
                 const Tensor& row_state_, const std::optional<Tensor>& norm_weight_, double eps,
                 bool pdl) {
  Args arg("lora_shrink_into");
  const ShrinkArgs args(arg, "out", out_, x_, a_, decode_meta_, row_state_, norm_weight_);
  const LoraShrinkParams p = args.params(eps, pdl);
  PHOTON_DISPATCH(lora_shrink, args.out, p);
}

void lora_expand(const Tensor& out_, const Tensor& h_, const Tensor& b_, const Tensor& decode_meta_,
                 const Tensor& row_state_, int64_t first_rows, bool pdl) {
  Args arg("lora_expand_");
  const ExpandArgs args(arg, "out", out_, h_, b_, decode_meta_, row_state_, first_rows);
  const LoraExpandParams p = args.params(pdl);
  PHOTON_DISPATCH(lora_expand, args.out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("lora_shrink_into", TORCH_BOX(&lora_shrink));
  m.impl("lora_expand_", TORCH_BOX(&lora_expand));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
