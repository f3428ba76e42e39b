// norm_linear_into, linear_residual_, norm_swiglu_into, swiglu_into, linear_norm_into: a linear
// with what comes before or after it in a layer.
#include "common/hopper_columns.h"
#include "ops/dispatch.h"
#include "ops/linear_args.h"

namespace photon::ops {
namespace {

// A workspace of `words`, which the function that `meaning` names counts, of which nothing else of
// the call may hold a part.
OptionalArg workspace_of(Args& arg, const std::optional<Tensor>& workspace_, int64_t words,
                         const char* meaning, std::initializer_list<const Arg*> others) {
  OptionalArg workspace = arg("workspace", workspace_);
  if (!workspace) return workspace;
  workspace->float32().rank(1, "[words]").contiguous().at_least(0, words, meaning);
  workspace->written(others);
  return workspace;
}

// For `x` [tokens, k] that is normalized.
OptionalArg workspace_argument(Args& arg, const std::optional<Tensor>& workspace_, const Arg& x,
                               std::initializer_list<const Arg*> others) {
  return workspace_of(arg, workspace_, linear_workspace_words(x.size(0), x.size(1)),
                      "linear_workspace_words of this call's shapes", others);
}

void norm_linear(const Tensor& out_, const Tensor& x_, const Tensor& norm_weight_, double eps,
                 const Tensor& weight_, const std::optional<Tensor>& bias_,
                 const std::optional<Tensor>& counts_, bool hopper, bool pdl,
                 const std::optional<Tensor>& workspace_) {
  Args arg("norm_linear_into");
  const LinearArgs args(arg, "out", out_, x_, weight_, bias_, counts_);
  const Arg norm_weight = arg("norm_weight", norm_weight_)
                              .dtype_of(args.x)
                              .shape({args.x.size(1)}, "[k of x]")
                              .contiguous();
  args.out.written({&norm_weight});
  const OptionalArg workspace = workspace_argument(
      arg, workspace_, args.x,
      {&args.out, &args.x, &norm_weight, &args.weight, args.bias.get(), args.counts.get()});

  NormLinearParams p{};
  args.fill(p);
  p.out = args.out.data<void>();
  p.out_stride = args.out.stride(0);
  p.norm_weight = norm_weight.data<void>();
  p.workspace = workspace.data<float>();
  p.eps = check_epsilon(args.out.op(), eps);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(norm_linear, args.out, p);
}

void linear_residual(const Tensor& residual_, const Tensor& x_, const Tensor& weight_,
                     const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                     bool hopper, bool pdl) {
  Args arg("linear_residual_");
  const LinearArgs args(arg, "residual", residual_, x_, weight_, bias_, counts_);

  LinearResidualParams p{};
  args.fill(p);
  p.residual = args.out.data<void>();
  p.residual_stride = args.out.stride(0);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(linear_residual, args.out, p);
}

// What SwiGLU's ops have in common.
struct SwigluArgs {
  Arg x, out, gate_up;
  OptionalArg bias, counts;
  int64_t tokens, intermediate, hidden;

  SwigluArgs(Args& arg, const Tensor& out_, const Tensor& x_, const Tensor& gate_up_weight_,
             const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_)
      : x(arg("x", x_).floating().rank(2, "[tokens, hidden]").last_contiguous()),
        out(arg("out", out_)
                .dtype_of(x)
                .shape({x.size(0), Arg::kAny}, "[tokens of x, intermediate]")
                .last_contiguous()),
        gate_up(arg("gate_up_weight", gate_up_weight_)
                    .dtype_of(x)
                    .rank(2, "[2 x intermediate, hidden]")
                    .even(0, "gate, then up")),
        bias(arg("bias", bias_)),
        counts(counts_argument(arg, counts_)),
        tokens(x.size(0)),
        intermediate(out.size(1)),
        hidden(x.size(1)) {
    gate_up.shape({2 * intermediate, hidden}, "[2 x intermediate of out, hidden of x]")
        .contiguous();
    if (bias) bias->dtype_of(x).shape({2 * intermediate}, "[2 x intermediate of out]").contiguous();
    out.written({&x, &gate_up, bias.get(), counts.get()});
  }

  template <typename Params>
  void fill(Params& p) const {
    p.out = out.data<void>();
    p.x = x.data<void>();
    p.weight = gate_up.data<void>();
    p.bias = bias.data<void>();
    p.counts = counts.data<int32_t>();
    p.tokens = tokens;
    p.intermediate = intermediate;
    p.hidden = hidden;
    p.out_stride = out.stride(0);
    p.x_stride = x.stride(0);
    p.dtype = x.dtype();
  }
};

void norm_swiglu(const Tensor& out_, const Tensor& x_, const Tensor& norm_weight_, double eps,
                 const Tensor& gate_up_weight_, const std::optional<Tensor>& bias_,
                 const std::optional<Tensor>& counts_, bool hopper, bool pdl,
                 const std::optional<Tensor>& workspace_) {
  Args arg("norm_swiglu_into");
  const SwigluArgs args(arg, out_, x_, gate_up_weight_, bias_, counts_);
  const Arg norm_weight = arg("norm_weight", norm_weight_)
                              .dtype_of(args.x)
                              .shape({args.hidden}, "[hidden of x]")
                              .contiguous();
  args.out.written({&norm_weight});
  const OptionalArg workspace = workspace_argument(
      arg, workspace_, args.x,
      {&args.out, &args.x, &norm_weight, &args.gate_up, args.bias.get(), args.counts.get()});

  NormSwigluParams p{};
  args.fill(p);
  p.norm_weight = norm_weight.data<void>();
  p.workspace = workspace.data<float>();
  p.eps = check_epsilon(args.out.op(), eps);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(norm_swiglu, args.out, p);
}

void swiglu(const Tensor& out_, const Tensor& x_, const Tensor& gate_up_weight_,
            const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_, bool hopper,
            bool pdl) {
  Args arg("swiglu_into");
  const SwigluArgs args(arg, out_, x_, gate_up_weight_, bias_, counts_);

  SwigluParams p{};
  args.fill(p);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(swiglu, args.out, p);
}

void linear_norm(const Tensor& out_, const Tensor& residual_, const Tensor& x_,
                 const Tensor& weight_, const Tensor& norm_weight_, double eps,
                 const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                 bool hopper, bool pdl, const std::optional<Tensor>& workspace_) {
  Args arg("linear_norm_into");
  const LinearArgs args(arg, "residual", residual_, x_, weight_, bias_, counts_);
  const int64_t tokens = args.x.size(0), n = args.weight.size(0);
  const Arg norm_weight =
      arg("norm_weight", norm_weight_).dtype_of(args.x).shape({n}, "[n of weight]").contiguous();
  const Arg out = arg("out", out_)
                      .dtype_of(args.x)
                      .shape({tokens, n}, "[tokens of x, n of weight]")
                      .last_contiguous();
  args.out.written({&norm_weight});
  out.written({&args.out, &args.x, &args.weight, &norm_weight, args.bias.get(), args.counts.get()});
  const OptionalArg workspace = workspace_of(
      arg, workspace_, linear_norm_workspace_words(tokens, n),
      "linear_norm_workspace_words of this call's shapes",
      {&out, &args.out, &args.x, &args.weight, &norm_weight, args.bias.get(), args.counts.get()});

  LinearNormParams p{};
  args.fill(p);
  p.out = out.data<void>();
  p.out_stride = out.stride(0);
  p.residual = args.out.data<void>();
  p.residual_stride = args.out.stride(0);
  p.norm_weight = norm_weight.data<void>();
  p.workspace = workspace.data<float>();
  p.eps = check_epsilon(out.op(), eps);
  p.hopper = hopper;
  p.pdl = pdl;
  PHOTON_DISPATCH(linear_norm, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("norm_linear_into", TORCH_BOX(&norm_linear));
  m.impl("linear_residual_", TORCH_BOX(&linear_residual));
  m.impl("norm_swiglu_into", TORCH_BOX(&norm_swiglu));
  m.impl("swiglu_into", TORCH_BOX(&swiglu));
  m.impl("linear_norm_into", TORCH_BOX(&linear_norm));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
