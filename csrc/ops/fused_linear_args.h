// What linears with a norm before them, or a residual behind, have in common with those that have
// adapters, too.
#pragma once
#include "common/hopper_columns.h"
#include "common/params.h"
#include "ops/linear_args.h"

namespace photon::ops {

// A workspace for `x` [tokens, k], of which nothing else of the call may hold a part.
inline OptionalArg workspace_argument(Args& arg, const std::optional<Tensor>& workspace_,
                                      const Arg& x, std::initializer_list<const Arg*> others) {
  OptionalArg workspace = arg("workspace", workspace_);
  if (!workspace) return workspace;
  workspace->float32()
      .rank(1, "[words]")
      .contiguous()
      .at_least(0, linear_workspace_words(x.size(0), x.size(1)),
                "linear_workspace_words of this call's shapes");
  workspace->written(others);
  return workspace;
}

struct NormLinearArgs {
  LinearArgs linear;
  Arg norm_weight;
  OptionalArg workspace;

  NormLinearArgs(Args& arg, const char* out_name, const Tensor& out_, const Tensor& x_,
                 const Tensor& norm_weight_, const Tensor& weight_,
                 const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                 const std::optional<Tensor>& workspace_)
      : linear(arg, out_name, out_, x_, weight_, bias_, counts_),
        norm_weight(arg("norm_weight", norm_weight_)
                        .dtype_of(linear.x)
                        .shape({linear.x.size(1)}, "[k of x]")
                        .contiguous()) {
    linear.out.written({&norm_weight});
    workspace = workspace_argument(arg, workspace_, linear.x,
                                   {&linear.out, &linear.x, &norm_weight, &linear.weight,
                                    linear.bias.get(), linear.counts.get()});
  }

  NormLinearParams params(double eps, bool hopper, bool pdl) const {
    NormLinearParams p{};
    linear.fill(p);
    p.out = linear.out.data<void>();
    p.out_stride = linear.out.stride(0);
    p.norm_weight = norm_weight.data<void>();
    p.workspace = workspace.data<float>();
    p.eps = check_epsilon(linear.out.op(), eps);
    p.hopper = hopper;
    p.pdl = pdl;
    return p;
  }
};

inline LinearResidualParams residual_params(const LinearArgs& args, bool hopper, bool pdl) {
  LinearResidualParams p{};
  args.fill(p);
  p.residual = args.out.data<void>();
  p.residual_stride = args.out.stride(0);
  p.hopper = hopper;
  p.pdl = pdl;
  return p;
}

}  // namespace photon::ops
