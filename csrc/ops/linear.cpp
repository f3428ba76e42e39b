// linear_into, gemv_into: out = x @ weight.T + bias.
#include "ops/dispatch.h"
#include "ops/linear_args.h"

namespace photon::ops {
namespace {

void linear(const Tensor& out_, const Tensor& x_, const Tensor& weight_,
            const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_, bool hopper,
            bool pdl) {
  Args arg("linear_into");
  const LinearArgs args(arg, "out", out_, x_, weight_, bias_, counts_);

  LinearParams p{};
  args.fill(p);
  p.out = args.out.data<void>();
  p.out_stride = args.out.stride(0);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(linear, args.out, p);
}

void gemv(const Tensor& out_, const Tensor& x_, const Tensor& weight_,
          const std::optional<Tensor>& bias_) {
  Args arg("gemv_into");
  const Arg x = arg("x", x_).floating().rank(1, "[k]").contiguous();
  const Arg weight = arg("weight", weight_)
                         .dtype_of(x)
                         .shape({Arg::kAny, x.size(0)}, "[n, k of x]")
                         .last_contiguous();
  const Arg out =
      arg("out", out_).dtype_of(x).shape({weight.size(0)}, "[n of weight]").contiguous();
  const OptionalArg bias = arg("bias", bias_);
  if (bias) bias->dtype_of(x).shape({weight.size(0)}, "[n of weight]").contiguous();
  out.written({&x, &weight, bias.get()});

  LinearParams p{};
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.weight = weight.data<void>();
  p.bias = bias.data<void>();
  p.tokens = 1;
  p.n = p.out_stride = weight.size(0);
  p.k = p.x_stride = x.size(0);
  p.weight_stride = weight.stride(0);
  p.dtype = x.dtype();
  PHOTON_DISPATCH(linear, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("linear_into", TORCH_BOX(&linear));
  m.impl("gemv_into", TORCH_BOX(&gemv));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
