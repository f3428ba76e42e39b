#ifdef PHOTON_WITH_CUDA
#include "device/cuda_error.h"

#include <stdexcept>

#include "device/text.h"

namespace photon::device::cuda {

namespace {

const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorNoDevice:
      return "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use backend "
             "'host'";
    case cudaErrorInsufficientDriver:
      return "the driver is older than the CUDA version of this build: update the driver, or "
             "rebuild with an older toolkit";
    case cudaErrorInvalidDevice:
      return "there is no device of that index: see _C.cuda_device_count()";
    case cudaErrorMemoryAllocation:
      return "free memory, or ask for fewer rows, pages or buckets";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return "what is captured may not synchronize, allocate outside a graph's pool, or use the "
             "default stream: run the forward once "
             "before "
             "capture, then capture it on this stream alone";
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureUnmatched:
      return "work forked to another stream inside the capture must be joined before it ends";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalInstruction:
      return "a kernel failed and this process cannot use the device any more: restart it; "
             "compute-sanitizer names the kernel";
    case cudaErrorNotReady:
      return "the event is not reached yet: synchronize first";
    case cudaErrorInvalidResourceHandle:
      return "the handle is not valid on this device: was it destroyed, recorded on another "
             "device, or made without timing?";
    default:
      return nullptr;
  }
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is reported here must not be found again by a later call
  const char* hint = advice(status);
  throw std::runtime_error(text(call, ": ", cudaGetErrorString(status), " (",
                                cudaGetErrorName(status), ")", hint == nullptr ? "" : "; ",
                                hint == nullptr ? "" : hint));
}

DeviceScope::DeviceScope(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

RelaxedCapture::RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace photon::device::cuda
#endif  // PHOTON_WITH_CUDA
