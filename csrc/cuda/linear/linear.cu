// linear: out = x W^T + bias.
#include "common/fallbacks.h"
#include "cuda/kernels.h"
#include "cuda/linear/batch_linear.h"
#include "cuda/linear/linear_tile.cuh"

namespace photon::cuda {

int linear(const LinearParams& p, void* stream) {
  if (p.tokens == 0 || p.n == 0) return 0;
  if (p.hopper && runs_hopper("linear_into", batch_misfit(p))) return batch_linear(p, stream);
  return multiply<Finish::kStore, false>(
      {p.out, p.x, nullptr, p.weight, p.bias, p.counts, p.tokens, p.n, p.k, p.out_stride,
       p.x_stride, p.weight_stride, 0.0f, p.dtype},
      stream);
}

}  // namespace photon::cuda
