// What the choice of a kernel follows from, besides its params: a GPU, as facts that can be given
// where there is none; and why a kernel does not take a call.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "host_device.h"

namespace photon {

struct Gpu {
  int major, minor;      // compute capability; 0.0: there is no GPU
  int64_t shared_bytes;  // of shared memory, that a CTA can ask for
  bool hopper_on_10;     // PHOTON_HOPPER_ON_10 is 1, and the build has machine code for 10.0
};

// A GPU of this compute capability.
constexpr Gpu gpu_of(int major, int minor, bool hopper_on_10) {
  const bool is_large = major == 9 || major == 10 || (major == 8 && (minor == 0 || minor == 7));
  const int64_t kib = major < 8 ? 48 : !is_large ? 99 : major == 8 ? 163 : 227;
  return {major, minor, kib * 1024, hopper_on_10};
}

// Why a kernel does not take a call; without a reason: it does.
struct Unsupported {
  const char* reason = nullptr;  // a string literal
  int64_t value = -1;            // what it is about; -1: the reason says it all

  explicit operator bool() const { return reason != nullptr; }
};

// Which kernel runs, and why not the one that was asked for; without a reason: it is that one.
template <typename Kernel>
struct KernelChoice {
  Kernel kernel;
  Unsupported why = {};
};

// Of all Hopper kernels. They have machine code for 9.0; for 10.0, where nothing has run yet, it
// has to be built (PHOTON_SM_100) and asked for. Other devices run the portable kernels' code
// for 8.0.
inline Unsupported hopper_unsupported(const Gpu& gpu) {
  if (gpu.major == 9 && gpu.minor == 0) return {};
  if (gpu.major == 0) return {"there is no GPU"};
  if (gpu.major != 10 || gpu.minor != 0) return {"the device's compute capability is not 9.0"};
  if (gpu.hopper_on_10) return {};
  return {
      "the device's compute capability is 10.0, where the Hopper kernels are untested; "
      "PHOTON_HOPPER_ON_10=1 allows them in a build with PHOTON_SM_100=1"};
}

// --- what kernels move in vectors of 16 bytes ----------------------------------------------------

constexpr int64_t kVectorBytes = 16;
constexpr const char* kMisaligned = "a pointer or a stride is no multiple of 16 bytes";
constexpr const char* kTooLarge = "sizes or strides are beyond what 32 bits index";
constexpr const char* kNotBf16 = "the dtype is not bfloat16";

PHOTON_HOST_DEVICE inline bool is_vector_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

template <typename... Pointers>
bool are_vector_aligned(Pointers... pointers) {
  return (is_vector_aligned(pointers) && ...);
}

// True where every one of these strides or widths, in elements of `dtype`, is a whole number of
// vectors.
template <typename... Strides>
bool are_whole_vectors(DType dtype, Strides... strides) {
  return ((strides * size_of(dtype) % kVectorBytes == 0) && ...);
}

}  // namespace photon
