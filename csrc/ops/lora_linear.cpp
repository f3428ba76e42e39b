// lora_norm_linear_into, lora_linear_residual_, lora_norm_swiglu_into: the fused linears of a layer
// with the adapters of tokens.
#include "cpu/lora.h"
#include "cuda/lora.h"
#include "ops/dispatch.h"
#include "ops/fused_linear_args.h"
#include "ops/lora_args.h"

namespace photon::ops {
namespace {

// Where CTAs leave sums to each other: nothing else of the call may hold a part of it, nor of h.
float* exchange_of(Args& arg, const Tensor& exchange_, const ShrinkArgs& shrink,
                   const LinearArgs& linear) {
  shrink.out.written({&linear.out, &linear.weight, linear.bias.get(), linear.counts.get()});
  return arg("exchange", exchange_)
      .float32()
      .rank(1, "[words]")
      .contiguous()
      .at_least(0, kLoraExchangeWords, "LORA_EXCHANGE_WORDS")
      .written({&linear.out, &linear.x, &linear.weight, &shrink.out, &shrink.a})
      .data<float>();
}

void lora_norm_linear(const Tensor& out_, const Tensor& x_, const Tensor& norm_weight_, double eps,
                      const Tensor& weight_, const std::optional<Tensor>& bias_,
                      const std::optional<Tensor>& counts_, const Tensor& h_, const Tensor& a_,
                      const Tensor& b_, const Tensor& decode_meta_, const Tensor& row_state_,
                      int64_t first_rows, const Tensor& exchange_, bool hopper, bool pdl,
                      const std::optional<Tensor>& workspace_) {
  Args arg("lora_norm_linear_into");
  const NormLinearArgs args(arg, "out", out_, x_, norm_weight_, weight_, bias_, counts_,
                            workspace_);
  const ShrinkArgs shrink(arg, "h", h_, x_, a_, decode_meta_, row_state_, norm_weight_);
  const ExpandArgs expand(arg, "out", out_, h_, b_, decode_meta_, row_state_, first_rows);
  const LoraNormLinearParams p{shrink.params(eps, pdl), args.params(eps, hopper, pdl),
                               expand.params(pdl),
                               exchange_of(arg, exchange_, shrink, args.linear)};
  PHOTON_DISPATCH(lora_norm_linear, args.linear.out, p);
}

void lora_linear_residual(const Tensor& residual_, const Tensor& x_, const Tensor& weight_,
                          const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                          const Tensor& h_, const Tensor& a_, const Tensor& b_,
                          const Tensor& decode_meta_, const Tensor& row_state_,
                          const Tensor& exchange_, bool hopper, bool pdl) {
  Args arg("lora_linear_residual_");
  const LinearArgs args(arg, "residual", residual_, x_, weight_, bias_, counts_);
  const ShrinkArgs shrink(arg, "h", h_, x_, a_, decode_meta_, row_state_, std::nullopt);
  const ExpandArgs expand(arg, "residual", residual_, h_, b_, decode_meta_, row_state_,
                          args.out.size(1));
  const LoraResidualParams p{shrink.params(0.0, pdl), residual_params(args, hopper, pdl),
                             expand.params(pdl), exchange_of(arg, exchange_, shrink, args)};
  PHOTON_DISPATCH(lora_linear_residual, args.out, p);
}

void lora_norm_swiglu(const Tensor& out_, const Tensor& gate_up_, const Tensor& x_,
                      const Tensor& norm_weight_, double eps, const Tensor& weight_,
                      const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                      const Tensor& h_, const Tensor& a_, const Tensor& b_,
                      const Tensor& decode_meta_, const Tensor& row_state_, const Tensor& exchange_,
                      bool hopper, bool pdl, const std::optional<Tensor>& workspace_) {
  Args arg("lora_norm_swiglu_into");
  const NormLinearArgs args(arg, "gate_up", gate_up_, x_, norm_weight_, weight_, bias_, counts_,
                            workspace_);
  const Arg& gate_up = args.linear.out.even(1, "gate, then up");
  const ShrinkArgs shrink(arg, "h", h_, x_, a_, decode_meta_, row_state_, norm_weight_);
  const ExpandArgs expand(arg, "gate_up", gate_up_, h_, b_, decode_meta_, row_state_,
                          gate_up.size(1) / 2);
  const Arg out = arg("out", out_)
                      .dtype_of(args.linear.x)
                      .shape({gate_up.size(0), gate_up.size(1) / 2}, "[tokens of x, half of n]")
                      .last_contiguous();
  out.written({&gate_up, &args.linear.x, &args.linear.weight, &args.norm_weight, &shrink.out,
               &shrink.a, &expand.b, args.linear.bias.get(), args.linear.counts.get(),
               args.workspace.get()});
  const SiluMulParams act{out.data<void>(), gate_up.data<void>(), out.size(0),          out.size(1),
                          out.stride(0),    gate_up.stride(0),    args.linear.x.dtype()};
  const LoraNormSwigluParams p{shrink.params(eps, pdl), args.params(eps, hopper, pdl),
                               expand.params(pdl), act,
                               exchange_of(arg, exchange_, shrink, args.linear)};
  PHOTON_DISPATCH(lora_norm_swiglu, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("lora_norm_linear_into", TORCH_BOX(&lora_norm_linear));
  m.impl("lora_linear_residual_", TORCH_BOX(&lora_linear_residual));
  m.impl("lora_norm_swiglu_into", TORCH_BOX(&lora_norm_swiglu));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
