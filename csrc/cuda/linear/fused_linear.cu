// norm_linear, linear_residual, norm_swiglu, swiglu and linear_norm: what the separate ops compute,
// bit for bit, in one kernel (linear_norm: two); or the Hopper kernels.
#include "common/fallbacks.h"
#include "cuda/kernels.h"
#include "cuda/linear/batch_linear.h"
#include "cuda/linear/linear_tile.cuh"
#include "cuda/linear/stream_linear.h"

namespace photon::cuda {
namespace {

template <typename Params>
bool streams(const char* op, const Params& p) {
  return p.hopper && runs_hopper(op, stream_misfit(p));
}

}  // namespace

int norm_linear(const NormLinearParams& p, void* stream) {
  if (p.tokens == 0 || p.n == 0) return 0;
  if (streams("norm_linear_into", p)) return stream_norm_linear(p, stream);
  return multiply<Finish::kStore, true>(
      {p.out, p.x, p.norm_weight, p.weight, p.bias, p.counts, p.tokens, p.n, p.k, p.out_stride,
       p.x_stride, p.weight_stride, p.eps, p.dtype},
      stream);
}

int linear_residual(const LinearResidualParams& p, void* stream) {
  if (p.tokens == 0 || p.n == 0) return 0;
  if (streams("linear_residual_", p)) return stream_linear_residual(p, stream);
  return multiply<Finish::kAdd, false>(
      {p.residual, p.x, nullptr, p.weight, p.bias, p.counts, p.tokens, p.n, p.k, p.residual_stride,
       p.x_stride, p.weight_stride, 0.0f, p.dtype},
      stream);
}

int norm_swiglu(const NormSwigluParams& p, void* stream) {
  if (p.tokens == 0 || p.intermediate == 0) return 0;
  if (streams("norm_swiglu_into", p)) return stream_norm_swiglu(p, stream);
  return multiply<Finish::kSwiglu, true>(
      {p.out, p.x, p.norm_weight, p.weight, p.bias, p.counts, p.tokens, p.intermediate, p.hidden,
       p.out_stride, p.x_stride, p.hidden, p.eps, p.dtype},
      stream);
}

int swiglu(const SwigluParams& p, void* stream) {
  if (p.tokens == 0 || p.intermediate == 0) return 0;
  if (p.hopper && runs_hopper("swiglu_into", batch_misfit(p))) return batch_swiglu(p, stream);
  return multiply<Finish::kSwiglu, false>(
      {p.out, p.x, nullptr, p.weight, p.bias, p.counts, p.tokens, p.intermediate, p.hidden,
       p.out_stride, p.x_stride, p.hidden, 0.0f, p.dtype},
      stream);
}

int linear_norm(const LinearNormParams& p, void* stream) {
  if (p.tokens == 0 || p.n == 0) return 0;
  if (p.hopper && runs_hopper("linear_norm_into", batch_misfit(p)))
    return batch_linear_norm(p, stream);
  const int error = multiply<Finish::kAdd, false>(
      {p.residual, p.x, nullptr, p.weight, p.bias, p.counts, p.tokens, p.n, p.k, p.residual_stride,
       p.x_stride, p.weight_stride, 0.0f, p.dtype},
      stream);
  if (error != 0) return error;
  return rms_norm({p.out, nullptr, p.residual, p.norm_weight, p.tokens, p.n, p.out_stride, 0,
                   p.residual_stride, p.eps, p.dtype, p.counts},
                  stream);
}

}  // namespace photon::cuda
