// What CTAs of one grid tell each other while it runs. All of them have to be resident at once: one
// CTA an SM, of a kernel that lets the next one start when each of its own CTAs runs.
#pragma once
#include <cuda_runtime.h>

#include "cuda/launch.cuh"

namespace photon::cuda {

// Launches a kernel whose CTAs wait for each other; an error where the device does not hold all of
// them at once.
template <typename... Params, typename... Args>
int launch_together(void (*kernel)(Params...), const LaunchShape& shape, void* stream,
                    const Args&... args) {
  LaunchShape one = shape;
  one.blocks = shape.cluster;
  one.pdl = false;
  const bool fits = shape.blocks <= sms() &&
                    (shape.cluster == 1 ||
                     shape.blocks <= int64_t{shape.cluster} * resident_clusters(kernel, one));
  return fits ? launch(kernel, shape, stream, args...) : cudaErrorInvalidConfiguration;
}

// One thread, behind a barrier of its CTA: adds to a count, after all that the CTA has written.
__device__ inline void arrive_in_grid(unsigned* count, unsigned added) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(added) : "memory");
}

// One thread: returns when the count has come to `expected`. What was written before is visible to
// its CTA behind a barrier.
__device__ inline void wait_in_grid(const unsigned* count, unsigned expected) {
  unsigned arrived;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(count) : "memory");
  } while (arrived < expected);
}

// Counts 0, 1, ... last, 0 and so on, and returns what the count was. It orders nothing.
__device__ inline unsigned count_leaver(unsigned* count, unsigned last) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(count), "r"(last)
               : "memory");
  return before;
}

// Asks L2 for the 128 bytes there.
__device__ inline void prefetch_to_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

}  // namespace photon::cuda
