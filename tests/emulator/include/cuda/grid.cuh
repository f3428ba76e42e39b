// csrc/cuda/grid.cuh for the host: the same functions, done by the engine.
#pragma once
#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "emulator/engine.h"

namespace photon::cuda {

using emulator::Site;

template <typename... Params, typename... Args>
int launch_together(void (*kernel)(Params...), const LaunchShape& shape, void* stream,
                    const Args&... args) {
  if (shape.blocks > sms()) return cudaErrorInvalidConfiguration;
  emulator::run_together(reinterpret_cast<const void*>(kernel));
  return launch(kernel, shape, stream, args...);
}

inline void arrive_in_grid(unsigned* count, unsigned added) {
  *count += added;
  emulator::arrive_in_grid();
}
inline void wait_in_grid(const unsigned* count, unsigned expected, Site site = emulator::here()) {
  while (*count < expected) emulator::wait_in_grid(site);
}
inline unsigned count_leaver(unsigned* count, unsigned last) { return atomicInc(count, last); }
inline void prefetch_to_l2(const void*) {}

}  // namespace photon::cuda
