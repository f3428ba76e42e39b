// linear_into, gemv_into, norm_linear_into, linear_residual_, norm_swiglu_into, swiglu_into,
// linear_norm_into: x @ weight.T + bias, with what comes before or after it in a layer; and
// dequantize_into, quantize_fp8_into.
#include "common/linear_plan.h"
#include "ops/dispatch.h"
#include "ops/weight_arg.h"

namespace photon::ops {
namespace {

// What all of them are given. `y`: the tensor that the products are stored in, or added to.
struct LinearArgs {
  Arg x;
  OptionalArg x_scale;
  WeightArg weight;
  OptionalArg bias;
  Arg y;
  OptionalArg counts;

  LinearParams params(Epilogue epilogue, bool hopper, bool pdl) const {
    const bool adds = epilogue == Epilogue::kAdd || epilogue == Epilogue::kAddNorm;
    LinearParams p{};
    (adds ? p.residual : p.out) = y.data<void>();
    (adds ? p.residual_stride : p.out_stride) = y.stride(0);
    p.x = x.data<void>();
    p.x_scales = x_scale.data<float>();
    p.weight = weight.weight();
    p.bias = bias.data<void>();
    p.counts = counts.data<int32_t>();
    p.tokens = x.size(0);
    p.x_stride = x.stride(0);
    p.epilogue = epilogue;
    p.backend = hopper ? Backend::kHopper : Backend::kPortable;
    p.pdl = pdl;
    p.dtype = y.dtype();
    return p;
  }
};

// What a call gives of a linear besides x, the weight's numbers and y.
struct LinearTensors {
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& counts;
  WeightTensors weight;
  const std::optional<Tensor>* x_scale = nullptr;  // null: the op takes none
};

// x as it is multiplied, and what its tokens are multiplied by: None where it has a floating dtype.
struct Tokens {
  Arg x;
  OptionalArg scale;

  Tokens(Args& arg, const Tensor& x_, const std::optional<Tensor>* scale_, const char* meaning)
      : x(arg("x", x_)) {
    if (scale_ != nullptr) scale = arg("x_scale", *scale_);
    if (scale) {
      x.fp8();
    } else if (scale_ != nullptr && x.is_fp8()) {
      fail(arg.op(), "x_scale is None, expected float32 [tokens of x], because x is float8_e4m3fn");
    } else {
      x.floating();
    }
    x.rank(2, meaning).last_contiguous();
    if (scale) scale->float32().shape({x.size(0)}, "[tokens of x]").contiguous();
  }

  // Whose dtype all but x has.
  const Arg& like(const Arg& y) const { return scale ? y.floating() : x; }
};

// [n] of the weight.
OptionalArg bias_argument(Args& arg, const std::optional<Tensor>& bias_, const Arg& x,
                          const WeightArg& weight, const char* meaning) {
  const OptionalArg bias = arg("bias", bias_);
  if (bias) bias->dtype_of(x).shape({weight.rows.size(0)}, meaning).contiguous();
  return bias;
}

// `y_name`: what the op calls y.
LinearArgs linear_args(Args& arg, const char* y_name, const Tensor& y_, const Tensor& x_,
                       const Tensor& weight_, const LinearTensors& others) {
  const Tokens tokens(arg, x_, others.x_scale, "[tokens, k]");
  const Arg& x = tokens.x;
  const Arg y = arg(y_name, y_);
  const Arg& like = tokens.like(y);
  const WeightArg weight(arg, arg("weight", weight_), others.weight, like, Arg::kAny, x.size(1),
                         "[n, k of x]");
  y.dtype_of(like)
      .shape({x.size(0), weight.rows.size(0)}, "[tokens of x, n of weight]")
      .last_contiguous();
  const OptionalArg bias = bias_argument(arg, others.bias, like, weight, "[n of weight]");
  const OptionalArg counts = counts_argument(arg, others.counts);
  y.written({&x, tokens.scale.get(), &weight.rows, bias.get(), weight.scale.get(),
             weight.zero.get(), weight.divisor.get(), counts.get()});
  return {x, tokens.scale, weight, bias, y, counts};
}

LinearArgs swiglu_args(Args& arg, const Tensor& out_, const Tensor& x_,
                       const Tensor& gate_up_weight_, const LinearTensors& others) {
  const Tokens tokens(arg, x_, others.x_scale, "[tokens, hidden]");
  const Arg& x = tokens.x;
  const Arg out = arg("out", out_);
  const Arg& like = tokens.like(out);
  out.dtype_of(like).shape({x.size(0), Arg::kAny}, "[tokens of x, intermediate]").last_contiguous();
  const Arg rows = arg("gate_up_weight", gate_up_weight_)
                       .rank(2, "[2 x intermediate, hidden]")
                       .even(0, "gate, then up")
                       .contiguous();
  const WeightArg weight(arg, rows, others.weight, like, 2 * out.size(1), x.size(1),
                         "[2 x intermediate of out, hidden of x]");
  const OptionalArg bias =
      bias_argument(arg, others.bias, like, weight, "[2 x intermediate of out]");
  const OptionalArg counts = counts_argument(arg, others.counts);
  out.written({&x, tokens.scale.get(), &weight.rows, bias.get(), weight.scale.get(),
               weight.zero.get(), weight.divisor.get(), counts.get()});
  return {x, tokens.scale, weight, bias, out, counts};
}

// The weight of a norm of `size` values, and its epsilon.
Arg take_norm(Args& arg, LinearParams& p, const LinearArgs& args, const Tensor& norm_weight_,
              double eps, int64_t size, const char* meaning) {
  const Arg norm_weight =
      arg("norm_weight", norm_weight_).dtype_of(args.y).shape({size}, meaning).contiguous();
  args.y.written({&norm_weight});
  p.norm_weight = norm_weight.data<void>();
  p.eps = check_epsilon(arg.op(), eps);
  return norm_weight;
}

// A workspace of `words`, which the function that `meaning` names counts. Nothing else of the call
// may hold a part of it.
void take_workspace(Args& arg, LinearParams& p, const LinearArgs& args, const Arg* norm_weight,
                    const Arg* out, const Arg* out_scale, const std::optional<Tensor>& workspace_,
                    int64_t words, const char* meaning) {
  const OptionalArg workspace = arg("workspace", workspace_);
  if (!workspace) return;
  workspace->float32().rank(1, "[words]").contiguous().at_least(0, words, meaning);
  workspace->written({out, out_scale, &args.y, &args.x, args.x_scale.get(), norm_weight,
                      &args.weight.rows, args.bias.get(), args.weight.scale.get(),
                      args.weight.zero.get(), args.weight.divisor.get(), args.counts.get()});
  p.workspace = workspace->data<float>();
}

// The same of linear_workspace_words.
void take_input_workspace(Args& arg, LinearParams& p, const LinearArgs& args,
                          const Arg* norm_weight, const std::optional<Tensor>& workspace_) {
  take_workspace(arg, p, args, norm_weight, nullptr, nullptr, workspace_,
                 linear_workspace_words(args.x.size(0), args.x.size(1)),
                 "linear_workspace_words of this call's shapes");
}

// x is normalized first.
void normalize_input(Args& arg, LinearParams& p, const LinearArgs& args, const Tensor& norm_weight_,
                     double eps, const char* meaning, const std::optional<Tensor>& workspace_) {
  p.prologue = Prologue::kRmsNorm;
  const Arg norm_weight = take_norm(arg, p, args, norm_weight_, eps, args.x.size(1), meaning);
  take_input_workspace(arg, p, args, &norm_weight, workspace_);
}

// Why the GPU does not read x in fp8; null: it does, or there is none.
const char* fp8_tokens_refused([[maybe_unused]] const Arg& y,
                               [[maybe_unused]] const LinearParams& p) {
#if defined(PHOTON_EMULATED_CUDA)
  if (y.device().type == aoti_torch_device_type_cpu()) return cuda::fp8_tokens_refused(p);
#elif defined(PHOTON_WITH_CUDA)
  if (y.device().type == aoti_torch_device_type_cuda()) {
    const CudaScope scope(y.op(), y.device());
    return cuda::fp8_tokens_refused(p);
  }
#endif
  return nullptr;
}

void run_linear(const LinearArgs& args, const LinearParams& p) {
  const char* const why = p.x_scales == nullptr ? nullptr : fp8_tokens_refused(args.y, p);
  if (why != nullptr)
    fail(args.y.op(), "x is float8_e4m3fn, which no kernel reads here: ", why,
         "; mend that, or give x in the dtype of ", args.y.name(), ", without x_scale");
  PHOTON_DISPATCH(linear, args.y, p);
}

void linear(const Tensor& out_, const Tensor& x_, const Tensor& weight_,
            const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_, bool hopper,
            bool pdl, const std::optional<Tensor>& scale_, int64_t format,
            const std::optional<Tensor>& zero_, const std::optional<Tensor>& divisor_,
            const std::optional<Tensor>& x_scale_) {
  Args arg("linear_into");
  const LinearArgs args =
      linear_args(arg, "out", out_, x_, weight_,
                  {bias_, counts_, {scale_, format, zero_, divisor_}, &x_scale_});
  run_linear(args, args.params(Epilogue::kStore, hopper, pdl));
}

void gemv(const Tensor& out_, const Tensor& x_, const Tensor& weight_,
          const std::optional<Tensor>& bias_, const std::optional<Tensor>& scale_, int64_t format,
          const std::optional<Tensor>& zero_, const std::optional<Tensor>& divisor_) {
  Args arg("gemv_into");
  const Arg x = arg("x", x_).floating().rank(1, "[k]").contiguous();
  const WeightArg weight(arg, arg("weight", weight_), {scale_, format, zero_, divisor_}, x,
                         Arg::kAny, x.size(0), "[n, k of x]");
  const Arg out =
      arg("out", out_).dtype_of(x).shape({weight.rows.size(0)}, "[n of weight]").contiguous();
  const OptionalArg bias = bias_argument(arg, bias_, x, weight, "[n of weight]");
  out.written(
      {&x, &weight.rows, bias.get(), weight.scale.get(), weight.zero.get(), weight.divisor.get()});

  LinearParams p{};
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.weight = weight.weight();
  p.bias = bias.data<void>();
  p.tokens = 1;
  p.out_stride = p.weight.n;
  p.x_stride = p.weight.k;
  p.dtype = x.dtype();
  PHOTON_DISPATCH(linear, out, p);
}

void norm_linear(const Tensor& out_, const Tensor& x_, const Tensor& norm_weight_, double eps,
                 const Tensor& weight_, const std::optional<Tensor>& bias_,
                 const std::optional<Tensor>& counts_, bool hopper, bool pdl,
                 const std::optional<Tensor>& workspace_, const std::optional<Tensor>& scale_,
                 int64_t format, const std::optional<Tensor>& zero_,
                 const std::optional<Tensor>& divisor_) {
  Args arg("norm_linear_into");
  const LinearArgs args = linear_args(arg, "out", out_, x_, weight_,
                                      {bias_, counts_, {scale_, format, zero_, divisor_}});
  LinearParams p = args.params(Epilogue::kStore, hopper, pdl);
  normalize_input(arg, p, args, norm_weight_, eps, "[k of x]", workspace_);
  PHOTON_DISPATCH(linear, args.y, p);
}

void linear_residual(const Tensor& residual_, const Tensor& x_, const Tensor& weight_,
                     const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                     bool hopper, bool pdl, const std::optional<Tensor>& workspace_,
                     const std::optional<Tensor>& scale_, int64_t format,
                     const std::optional<Tensor>& zero_, const std::optional<Tensor>& divisor_) {
  Args arg("linear_residual_");
  const LinearArgs args = linear_args(arg, "residual", residual_, x_, weight_,
                                      {bias_, counts_, {scale_, format, zero_, divisor_}});
  LinearParams p = args.params(Epilogue::kAdd, hopper, pdl);
  take_input_workspace(arg, p, args, nullptr, workspace_);
  PHOTON_DISPATCH(linear, args.y, p);
}

void norm_swiglu(const Tensor& out_, const Tensor& x_, const Tensor& norm_weight_, double eps,
                 const Tensor& gate_up_weight_, const std::optional<Tensor>& bias_,
                 const std::optional<Tensor>& counts_, bool hopper, bool pdl,
                 const std::optional<Tensor>& workspace_, const std::optional<Tensor>& scale_,
                 int64_t format, const std::optional<Tensor>& zero_,
                 const std::optional<Tensor>& divisor_) {
  Args arg("norm_swiglu_into");
  const LinearArgs args = swiglu_args(arg, out_, x_, gate_up_weight_,
                                      {bias_, counts_, {scale_, format, zero_, divisor_}});
  LinearParams p = args.params(Epilogue::kSwiglu, hopper, pdl);
  normalize_input(arg, p, args, norm_weight_, eps, "[hidden of x]", workspace_);
  PHOTON_DISPATCH(linear, args.y, p);
}

void swiglu(const Tensor& out_, const Tensor& x_, const Tensor& gate_up_weight_,
            const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_, bool hopper,
            bool pdl, const std::optional<Tensor>& scale_, int64_t format,
            const std::optional<Tensor>& zero_, const std::optional<Tensor>& divisor_,
            const std::optional<Tensor>& x_scale_) {
  Args arg("swiglu_into");
  const LinearArgs args =
      swiglu_args(arg, out_, x_, gate_up_weight_,
                  {bias_, counts_, {scale_, format, zero_, divisor_}, &x_scale_});
  run_linear(args, args.params(Epilogue::kSwiglu, hopper, pdl));
}

void linear_norm(const Tensor& out_, const Tensor& residual_, const Tensor& x_,
                 const Tensor& weight_, const Tensor& norm_weight_, double eps,
                 const std::optional<Tensor>& bias_, const std::optional<Tensor>& counts_,
                 bool hopper, bool pdl, const std::optional<Tensor>& workspace_,
                 const std::optional<Tensor>& scale_, int64_t format,
                 const std::optional<Tensor>& zero_, const std::optional<Tensor>& divisor_,
                 const std::optional<Tensor>& x_scale_, const std::optional<Tensor>& out_scale_) {
  Args arg("linear_norm_into");
  const LinearArgs args =
      linear_args(arg, "residual", residual_, x_, weight_,
                  {bias_, counts_, {scale_, format, zero_, divisor_}, &x_scale_});
  const int64_t tokens = args.x.size(0), n = args.weight.rows.size(0);
  LinearParams p = args.params(Epilogue::kAddNorm, hopper, pdl);
  const Arg norm_weight = take_norm(arg, p, args, norm_weight_, eps, n, "[n of weight]");
  const Arg out = arg("out", out_);
  const OptionalArg out_scale = arg("out_scale", out_scale_);
  if (out_scale) {
    if (!args.x_scale)
      fail(arg.op(), "out_scale is a tensor, expected None, because x is not in fp8");
    out.fp8();
    out_scale->float32().shape({tokens}, "[tokens of x]").contiguous();
    out_scale->written({&out, &args.y, &args.x, args.x_scale.get(), &args.weight.rows, &norm_weight,
                        args.bias.get(), args.weight.scale.get(), args.counts.get()});
  } else {
    out.dtype_of(args.y);
  }
  out.shape({tokens, n}, "[tokens of x, n of weight]").last_contiguous();
  out.written({&args.y, &args.x, args.x_scale.get(), &args.weight.rows, &norm_weight,
               args.bias.get(), args.weight.scale.get(), args.weight.zero.get(),
               args.weight.divisor.get(), args.counts.get()});
  p.out = out.data<void>();
  p.out_stride = out.stride(0);
  p.out_scales = out_scale.data<float>();
  take_workspace(arg, p, args, &norm_weight, &out, out_scale.get(), workspace_,
                 linear_norm_workspace_words(tokens, n),
                 "linear_norm_workspace_words of this call's shapes");
  run_linear(args, p);
}

void dequantize(const Tensor& out_, const Tensor& weight_, const std::optional<Tensor>& scale_,
                int64_t format, const std::optional<Tensor>& zero_,
                const std::optional<Tensor>& divisor_) {
  Args arg("dequantize_into");
  const Arg out = arg("out", out_).floating().rank(2, "[n, k]").last_contiguous();
  const WeightArg weight(arg, arg("weight", weight_), {scale_, format, zero_, divisor_}, out,
                         out.size(0), out.size(1), "[n, k of out]");
  DequantizeParams p{out.data<void>(), weight.weight(), out.stride(0), out.dtype()};
  if (p.weight.format == WeightFormat::kDense)
    fail(arg.op(), "weight is dense, expected one that is stored in fewer bits");
  out.written({&weight.rows, weight.scale.get(), weight.zero.get(), weight.divisor.get()});
  PHOTON_DISPATCH(dequantize, out, p);
}

void quantize_fp8(const Tensor& out_, const Tensor& scale_, const Tensor& x_,
                  const std::optional<Tensor>& counts_) {
  Args arg("quantize_fp8_into");
  const Arg out = arg("out", out_).fp8().rank(2, "[tokens, k]").last_contiguous();
  const Arg scale =
      arg("scale", scale_).float32().shape({out.size(0)}, "[tokens of out]").contiguous();
  const Arg x = arg("x", x_)
                    .floating()
                    .shape({out.size(0), out.size(1)}, "the shape of out")
                    .last_contiguous();
  const OptionalArg counts = counts_argument(arg, counts_);
  out.written({&scale, &x, counts.get()});
  scale.written({&x, counts.get()});
  const QuantizeFp8Params p{out.data<uint8_t>(),    scale.data<float>(), x.data<void>(),
                            counts.data<int32_t>(), x.size(0),           x.size(1),
                            out.stride(0),          x.stride(0),         x.dtype()};
  PHOTON_DISPATCH(quantize_fp8, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("linear_into", TORCH_BOX(&linear));
  m.impl("gemv_into", TORCH_BOX(&gemv));
  m.impl("norm_linear_into", TORCH_BOX(&norm_linear));
  m.impl("linear_residual_", TORCH_BOX(&linear_residual));
  m.impl("norm_swiglu_into", TORCH_BOX(&norm_swiglu));
  m.impl("swiglu_into", TORCH_BOX(&swiglu));
  m.impl("linear_norm_into", TORCH_BOX(&linear_norm));
  m.impl("dequantize_into", TORCH_BOX(&dequantize));
  m.impl("quantize_fp8_into", TORCH_BOX(&quantize_fp8));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
