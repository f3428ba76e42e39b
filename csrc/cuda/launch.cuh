// What every launcher needs: the launch itself, the current device, and the element type as a C++
// type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/gpu.h"

namespace photon::cuda {

constexpr int kWarpSize = 32;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int log2_of(int64_t power) {
  int bits = 0;
  while (power > int64_t{1} << bits) ++bits;
  return bits;
}

struct LaunchShape {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;  // dynamic shared memory of a CTA
  unsigned cluster = 1;     // CTAs per cluster; more than one needs compute capability 9.0
  bool pdl = false;         // may start while the kernel before it still runs, and must call
                            // wait_for_earlier(); needs 9.0
};

constexpr size_t kDefaultSharedBytes = 48 * 1024;  // beyond it a kernel has to ask

// An attribute of the current device; 0 where it cannot be told.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess)
    return value;
  cudaGetLastError();  // leaves no error for a launch to find
  return 0;
}

// Prepares a kernel for launches of this shape. The limit is the device's and not the shape's: it
// belongs to the kernel, which other threads and graphs launch in other shapes.
inline cudaError_t allow_shape(const void* kernel, const LaunchShape& shape) {
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > kDefaultSharedBytes) {
    const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit);
  }
  // All of L1 as shared memory: else there may be no room for a CTA of the next kernel beside one
  // of this. All kernels of a chain alike, because an SM has to be idle before it is divided in
  // another way.
  if (error == cudaSuccess && (shape.shared_bytes > kDefaultSharedBytes || shape.pdl)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  if (error != cudaSuccess) cudaGetLastError();  // or the next launch would find it
  return error;
}

// A shape as the runtime takes it. It points into itself, so it is not copied.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  LaunchConfig(const LaunchShape& shape, void* stream) {
    if (shape.cluster > 1) {
      cudaLaunchAttribute& own = attributes[config.numAttrs++];
      own.id = cudaLaunchAttributeClusterDimension;
      own.val.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.pdl) {
      cudaLaunchAttribute& own = attributes[config.numAttrs++];
      own.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      own.val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};

// Enqueues `kernel` and returns the error of the launch. The runtime is linked statically, so the
// last error is never anybody else's. A grid that has too many CTAs is an error here, before its
// count is narrowed to what a launch takes.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), const LaunchShape& shape, void* stream, const Args&... args) {
  if (shape.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (const cudaError_t refused = allow_shape(reinterpret_cast<const void*>(kernel), shape);
      refused != cudaSuccess)
    return refused;
  const LaunchConfig prepared(shape, stream);
  const cudaError_t error = cudaLaunchKernelEx(&prepared.config, kernel, args...);
  const cudaError_t last = cudaGetLastError();
  return error != cudaSuccess ? error : last;
}

// How many clusters of this shape, of one cluster, the current device holds at a time; 1 where it
// cannot be told.
template <typename... Params>
int resident_clusters(void (*kernel)(Params...), const LaunchShape& shape) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  const LaunchConfig prepared(shape, nullptr);
  int clusters = 0;
  if (allow_shape(function, shape) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, function, &prepared.config) == cudaSuccess)
    return clusters > 1 ? clusters : 1;
  cudaGetLastError();  // leaves no error for a launch to find
  return 1;
}

template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, void* stream,
           const Args&... args) {
  return launch(kernel, LaunchShape{blocks, threads}, stream, args...);
}

inline int sms() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Whether the Hopper kernels may run on 10.0: they are built for it, and PHOTON_HOPPER_ON_10 is 1,
// which is read once.
inline bool allows_hopper_on_10() {
#ifdef PHOTON_SM_100
  static const bool allows = [] {
    const char* text = std::getenv("PHOTON_HOPPER_ON_10");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return allows;
#else
  return false;
#endif
}

// The current device.
inline Gpu current_gpu() {
  return {device_attribute(cudaDevAttrComputeCapabilityMajor),
          device_attribute(cudaDevAttrComputeCapabilityMinor),
          device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), allows_hopper_on_10()};
}

inline bool hopper_runs() { return !hopper_unsupported(current_gpu()); }

// A small kernel of a chain, which calls wait_for_earlier() before anything else: where it can be,
// it is there when the one before ends.
inline LaunchShape waiting_shape(int64_t blocks, int threads) {
  LaunchShape shape{blocks, threads};
  shape.pdl = hopper_runs();
  return shape;
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

}  // namespace photon::cuda
