// A small persistent thread pool for the kernels. The caller works too; helpers claim chunks as
// they become free, so a helper that is late or descheduled delays nobody, and the results of a
// kernel may not depend on who ran which chunk.
#pragma once
#include <cstdint>

namespace photon::cpu {

// Threads that a parallel_for uses, the caller included. Starts as PHOTON_NUM_THREADS, or the
// number of cores this process may use: those of its affinity, or as many as the processor time it
// is given is worth.
int num_threads();

// Takes effect at the next parallel_for; values are clamped to 1 .. 256.
void set_num_threads(int threads);

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Calls function(context, begin, end) over disjoint ranges that cover 0 .. n; returns when all are
// done. Every range but the last is a multiple of `grain` long. May be called from any thread;
// where the pool is busy (another thread, or a nested call), the caller runs alone.
void parallel_ranges(int64_t n, int64_t grain, RangeFunction function, const void* context);

template <typename F>
void parallel_for(int64_t n, int64_t grain, const F& body) {
  parallel_ranges(
      n, grain,
      [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const F*>(context))(begin, end);
      },
      &body);
}

}  // namespace photon::cpu
