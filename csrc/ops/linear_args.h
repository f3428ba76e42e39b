// What linear_into, norm_linear_into and linear_residual_ have in common: out, or what is added to,
// from x @ weight.T + bias.
#pragma once
#include "ops/checks.h"

namespace photon::ops {

struct LinearArgs {
  Arg x, weight, out;
  OptionalArg bias, counts;

  // `out_name`: what the op calls the tensor that it writes.
  LinearArgs(Args& arg, const char* out_name, const Tensor& out_, const Tensor& x_,
             const Tensor& weight_, const std::optional<Tensor>& bias_,
             const std::optional<Tensor>& counts_)
      : x(arg("x", x_).floating().rank(2, "[tokens, k]").last_contiguous()),
        weight(arg("weight", weight_)
                   .dtype_of(x)
                   .shape({Arg::kAny, x.size(1)}, "[n, k of x]")
                   .last_contiguous()),
        out(arg(out_name, out_)
                .dtype_of(x)
                .shape({x.size(0), weight.size(0)}, "[tokens of x, n of weight]")
                .last_contiguous()),
        bias(arg("bias", bias_)),
        counts(counts_argument(arg, counts_)) {
    if (bias) bias->dtype_of(x).shape({weight.size(0)}, "[n of weight]").contiguous();
    out.written({&x, &weight, bias.get(), counts.get()});
  }

  // Everything but what is written.
  template <typename Params>
  void fill(Params& p) const {
    p.x = x.data<void>();
    p.weight = weight.data<void>();
    p.bias = bias.data<void>();
    p.counts = counts.data<int32_t>();
    p.tokens = x.size(0);
    p.n = weight.size(0);
    p.k = x.size(1);
    p.x_stride = x.stride(0);
    p.weight_stride = weight.stride(0);
    p.dtype = x.dtype();
  }
};

}  // namespace photon::ops
