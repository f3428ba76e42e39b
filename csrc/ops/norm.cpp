// rms_norm_into, add_rms_norm_into.
#include "ops/dispatch.h"

namespace photon::ops {
namespace {

// Both ops: residual is null for rms_norm_into.
void normalize(const Arg& out, const Arg* residual, const Arg& x, const Arg& weight, double eps) {
  x.floating().rank(2, "[tokens, hidden]").last_contiguous();
  weight.dtype_of(x).shape({x.size(1)}, "[hidden of x]").contiguous();
  out.dtype_of(x).shape({x.size(0), x.size(1)}, "the shape of x").last_contiguous();
  if (residual != nullptr)
    residual->dtype_of(x)
        .shape({x.size(0), x.size(1)}, "the shape of x")
        .last_contiguous()
        .written({&x, &weight});
  out.written({residual, &x, &weight});

  RmsNormParams p{};
  if (residual != nullptr) {
    p.residual = residual->data<void>();
    p.residual_stride = residual->stride(0);
  }
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.weight = weight.data<void>();
  p.tokens = x.size(0);
  p.hidden = x.size(1);
  p.out_stride = out.stride(0);
  p.x_stride = x.stride(0);
  p.eps = check_epsilon(out.op(), eps);
  p.dtype = x.dtype();
  PHOTON_DISPATCH(rms_norm, out, p);
}

void rms_norm(const Tensor& out_, const Tensor& x_, const Tensor& weight_, double eps) {
  Args arg("rms_norm_into");
  const Arg out = arg("out", out_);
  const Arg x = arg("x", x_);
  const Arg weight = arg("weight", weight_);
  normalize(out, nullptr, x, weight, eps);
}

void add_rms_norm(const Tensor& out_, const Tensor& residual_, const Tensor& x_,
                  const Tensor& weight_, double eps) {
  Args arg("add_rms_norm_into");
  const Arg out = arg("out", out_);
  const Arg residual = arg("residual", residual_);
  const Arg x = arg("x", x_);
  const Arg weight = arg("weight", weight_);
  normalize(out, &residual, x, weight, eps);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("rms_norm_into", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm_into", TORCH_BOX(&add_rms_norm));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
