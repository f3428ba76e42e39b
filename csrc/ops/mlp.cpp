// silu_mul_into, fused_mlp_into.
#include "ops/dispatch.h"
#include "ops/weight_arg.h"

namespace photon::ops {
namespace {

void silu_mul(const Tensor& out_, const Tensor& gate_up_) {
  Args arg("silu_mul_into");
  const Arg gate_up = arg("gate_up", gate_up_)
                          .floating()
                          .rank(2, "[tokens, 2 x width]")
                          .even(1, "gate, then up")
                          .last_contiguous();
  const Arg out = arg("out", out_).dtype_of(gate_up).rank(2, "[tokens, width]").last_contiguous();
  gate_up.shape({out.size(0), 2 * out.size(1)}, "[tokens of out, 2 x width of out]");
  out.written({&gate_up});

  SiluMulParams p{};
  p.out = out.data<void>();
  p.gate_up = gate_up.data<void>();
  p.tokens = out.size(0);
  p.width = out.size(1);
  p.out_stride = out.stride(0);
  p.gate_up_stride = gate_up.stride(0);
  p.dtype = out.dtype();
  PHOTON_DISPATCH(silu_mul, out, p);
}

// SwiGLU into act, then down: two linears.
void fused_mlp(const Tensor& out_, const Tensor& act_, const Tensor& x_,
               const Tensor& gate_up_weight_, const Tensor& down_weight_,
               const std::optional<Tensor>& counts_) {
  Args arg("fused_mlp_into");
  const Arg x = arg("x", x_).floating().rank(2, "[tokens, hidden]").last_contiguous();
  const int64_t tokens = x.size(0), hidden = x.size(1);
  const WeightArg down(arg("down_weight", down_weight_)
                           .dtype_of(x)
                           .shape({hidden, Arg::kAny}, "[hidden of x, intermediate]")
                           .contiguous());
  const int64_t intermediate = down.rows.size(1);
  const WeightArg gate_up(
      arg("gate_up_weight", gate_up_weight_)
          .dtype_of(x)
          .shape({2 * intermediate, hidden}, "[2 x intermediate of down_weight, hidden of x]")
          .contiguous());
  const Arg act = arg("act", act_)
                      .dtype_of(x)
                      .shape({tokens, intermediate}, "[tokens of x, intermediate of down_weight]")
                      .last_contiguous();
  const Arg out =
      arg("out", out_).dtype_of(x).shape({tokens, hidden}, "the shape of x").last_contiguous();
  const OptionalArg counts = counts_argument(arg, counts_);
  out.written({&act, &x, &gate_up.rows, &down.rows, counts.get()});
  act.written({&x, &gate_up.rows, &down.rows, counts.get()});

  LinearParams p{};
  p.out = act.data<void>();
  p.x = x.data<void>();
  p.weight = gate_up.weight();
  p.counts = counts.data<int32_t>();
  p.tokens = tokens;
  p.out_stride = act.stride(0);
  p.x_stride = x.stride(0);
  p.epilogue = Epilogue::kSwiglu;
  p.dtype = x.dtype();
  PHOTON_DISPATCH(linear, out, p);
  p.x = p.out;
  p.x_stride = p.out_stride;
  p.out = out.data<void>();
  p.out_stride = out.stride(0);
  p.weight = down.weight();
  p.epilogue = Epilogue::kStore;
  PHOTON_DISPATCH(linear, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("silu_mul_into", TORCH_BOX(&silu_mul));
  m.impl("fused_mlp_into", TORCH_BOX(&fused_mlp));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
