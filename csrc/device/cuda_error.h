// CUDA errors as exceptions, and the current device as a scope. Included by csrc/device/cuda_*.cpp
// only.
#pragma once
#include <cuda_runtime_api.h>

namespace photon::device::cuda {

// Raises std::runtime_error naming the call, CUDA's own words and, where known, what to do.
void check(cudaError_t status, const char* call);

// Makes `device` current for a scope; torch's own current device is the caller's again afterwards.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

// Lets this thread wait for events and destroy things while another stream is capturing in CUDA's
// strictest mode: a wait or the garbage collector must not break somebody's capture.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace photon::device::cuda
