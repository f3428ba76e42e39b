// Linears of x as it is, by the portable kernel.
#include "cuda/linear/linear_tile.h"

#include "cuda/linear/linear_tile.cuh"

namespace photon::cuda {

int run_tile_linear(const LinearParams& p, void* stream) {
  switch (p.epilogue) {
    case Epilogue::kStore:
      return launch_tile<Epilogue::kStore, false>(p, stream);
    case Epilogue::kSwiglu:
      return launch_tile<Epilogue::kSwiglu, false>(p, stream);
    case Epilogue::kAdd:
      return launch_tile<Epilogue::kAdd, false>(p, stream);
    case Epilogue::kAddNorm:
      if (const int error = launch_tile<Epilogue::kAdd, false>(p, stream)) return error;
      return norm_residual(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace photon::cuda
