// What every launcher needs: the launch itself, the element type as a C++ type, and whether 16-byte loads are possible.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace photon::cuda {

constexpr int kWarpSize = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Enqueues `kernel` and returns the error of the launch. The runtime is linked statically, so the last error is never anybody else's.
// A grid that has too many blocks is an error here, before its count is narrowed to what a launch takes.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, void* stream, const Args&... args) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(args...);
  return cudaGetLastError();
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls `body` with the tag of the element type that `dtype` names.
template <typename Body>
int with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(TypeTag<float>{});
    case DType::kF16:
      return body(TypeTag<__half>{});
    case DType::kBF16:
      return body(TypeTag<__nv_bfloat16>{});
  }
  return cudaErrorInvalidValue;
}

constexpr int64_t kVectorBytes = 16;

inline bool is_vector_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; }

// True where every one of these strides or widths, in elements of `dtype`, is a whole number of 16-byte vectors.
template <typename... Strides>
bool are_whole_vectors(DType dtype, Strides... strides) {
  return ((strides * size_of(dtype) % kVectorBytes == 0) && ...);
}

}  // namespace photon::cuda
