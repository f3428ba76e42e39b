// Stands in for the CUDA toolkit's header: what csrc/cuda and csrc/ops call on the host. There is
// one device.
#pragma once
#include "emulator/keywords.h"

enum cudaError_t : int {  // the toolkit's numbers
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

using cudaStream_t = struct CUstream_st*;

enum cudaDeviceAttr : int {
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaFuncAttribute : int {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 13,
};

enum cudaLaunchAttributeID : int {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};

union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

enum cudaDriverEntryPointQueryResult : int {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
};

constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
// What PHOTON_EMULATOR_SMS (4) and PHOTON_EMULATOR_COMPUTE_CAPABILITY (9.0) say, and an H100's
// shared memory.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
// As many as fit with two CTAs on an SM.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config);
// Finds the functions of the driver that cuda.h declares here.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result = nullptr);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
// Of cudaErrorLaunchFailure: what the last kernel that this thread launched did wrong.
const char* cudaGetErrorString(cudaError_t error);
