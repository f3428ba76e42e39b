// Linears of x that is normalized first, by the portable kernel: a source of its own, so that the
// two compile side by side.
#include "cuda/linear/linear_tile.cuh"
#include "cuda/linear/linear_tile.h"

namespace photon::cuda {

int run_tile_norm_linear(const LinearParams& p, void* stream) {
  switch (p.epilogue) {
    case Epilogue::kStore:
      return launch_tile<Epilogue::kStore, true>(p, stream);
    case Epilogue::kSwiglu:
      return launch_tile<Epilogue::kSwiglu, true>(p, stream);
    default:
      return cudaErrorInvalidValue;  // there is no such op
  }
}

}  // namespace photon::cuda
