// When a CTA of a decode kernel came to which point, for benchmarks/lab/stamps.py. A build with
// PHOTON_STAMPS=1 has it; in any other all of this is empty, and kernels have not an instruction
// of it.
//
// One thread of a CTA takes a record when it starts and notes the SM's clock at each point. An
// atomic counter deals records out, so that they stand in no order; what they are of is in them.
// The thread waits for its record where it comes to the second point, half a microsecond after the
// start at the earliest, when it waits for the kernel before anyway.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace photon::cuda {

// The first thread of a CTA starts; the kernels before have ended; the first activations (or
// queries) have arrived; the sums are complete; the results are written. Of several passes or tile
// ranges the last one counts, and of kLoaded the first.
enum class Point : int { kStart, kWaited, kLoaded, kSummed, kStored };

enum class StampedKernel : int { kNormLinear, kNormSwiglu, kLinearResidual, kAttention };

#ifdef PHOTON_STAMPS

constexpr int kPoints = 5;
constexpr unsigned kMostStamps = 1u << 17;  // CTAs until they are taken; those beyond are lost

// As benchmarks/lab/stamps.py reads it.
struct StampRecord {
  int32_t kernel, rows, columns, cta, sm, reserved;
  uint64_t ns;              // of the device's timer, at kStart
  uint64_t clock[kPoints];  // of the SM; 0: the CTA did not come there
};

// Of one source: what includes this has its own.
static __device__ unsigned stamp_count;
static __device__ StampRecord stamp_records[kMostStamps];

class Stamps {
 public:
  // `rows`, `columns`: what tells launches of a kernel apart.
  __device__ Stamps(StampedKernel kernel, int rows, int columns) {
    if (threadIdx.x > 0) return;
    uint64_t ns;
    uint32_t sm;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    const uint64_t now = clock64();
    index_ = atomicAdd(&stamp_count, 1u);
    if (index_ >= kMostStamps) return;
    stamp_records[index_] = {static_cast<int>(kernel), rows, columns, static_cast<int>(blockIdx.x),
                             static_cast<int>(sm),     0,    ns,      {now}};
  }

  __device__ void at(Point point) const {
    if (threadIdx.x == 0 && index_ < kMostStamps)
      stamp_records[index_].clock[static_cast<int>(point)] = clock64();
  }

 private:
  unsigned index_ = kMostStamps;
};

// Copies what the source's kernels have noted since the last call to `to`, which has room for
// `room` records, and forgets it. Returns how many records there are, or -1: a CUDA call failed.
static int64_t take_stamps(void* to, int64_t room) {
  unsigned count = 0;
  constexpr unsigned kNone = 0;
  if (cudaDeviceSynchronize() != cudaSuccess ||
      cudaMemcpyFromSymbol(&count, stamp_count, sizeof(count)) != cudaSuccess)
    return -1;
  int64_t records = count < kMostStamps ? count : kMostStamps;
  if (records > room) records = room;
  if (records > 0 &&
      cudaMemcpyFromSymbol(to, stamp_records, records * sizeof(StampRecord)) != cudaSuccess)
    return -1;
  return cudaMemcpyToSymbol(stamp_count, &kNone, sizeof(kNone)) == cudaSuccess ? records : -1;
}

// For a source that includes this: the function that hands its stamps to the process.
#define PHOTON_TAKE_STAMPS(name)                                                        \
  extern "C" __attribute__((visibility("default"))) int64_t photon_ext_##name##_stamps( \
      void* to, int64_t room) {                                                         \
    return photon::cuda::take_stamps(to, room);                                         \
  }

#else

class Stamps {
 public:
  __device__ Stamps(StampedKernel, int, int) {}
  __device__ void at(Point) const {}
};

#define PHOTON_TAKE_STAMPS(name)

#endif

}  // namespace photon::cuda
