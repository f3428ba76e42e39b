#include "ops/dispatch.h"

#include "common/fallbacks.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

#ifdef PHOTON_WITH_CUDA
#include <cuda_runtime_api.h>

// Weak: a torch without CUDA does not define it, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace photon::ops {
namespace {
thread_local const HostQueue* t_queue = nullptr;
}

const HostQueue* claimed_queue() { return t_queue; }

#ifdef PHOTON_WITH_CUDA

CudaScope::CudaScope(const char* op, DeviceId device) : op_(op) {
  if (aoti_torch_get_current_cuda_stream == nullptr)
    fail(op, "got CUDA tensors, but this torch has no CUDA; install a torch with CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  int current = -1;
  check_launch(cudaGetDevice(&current));
  if (current != device.index) other_device_.emplace(device.index);
}

void CudaScope::check_launch(int error) const {
  if (error != cudaSuccess)
    fail(op_, "CUDA said: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

#else

CudaScope::CudaScope(const char* op, DeviceId) : op_(op) {}
void CudaScope::check_launch(int) const {}

#endif

}  // namespace photon::ops

#define PHOTON_EXPORT __attribute__((visibility("default")))

extern "C" {

PHOTON_EXPORT const photon::HostQueue* photon_ext_set_host_queue(const photon::HostQueue* queue) {
  const photon::HostQueue* previous = photon::ops::t_queue;
  photon::ops::t_queue = queue;
  return previous;
}

PHOTON_EXPORT int photon_ext_num_threads() { return photon::cpu::num_threads(); }
PHOTON_EXPORT void photon_ext_set_num_threads(int threads) {
  photon::cpu::set_num_threads(threads);
}
PHOTON_EXPORT bool photon_ext_has_hopper() {
#if defined(PHOTON_WITH_CUDA) || defined(PHOTON_EMULATED_CUDA)
  return photon::cuda::has_hopper();
#else
  return false;
#endif
}
// Null past the last one, as the reason is.
PHOTON_EXPORT const char* photon_ext_fallback_op(int index) {
  return photon::fallbacks().at(index).op;
}
PHOTON_EXPORT const char* photon_ext_fallback_reason(int index) {
  return photon::fallbacks().at(index).reason;
}
PHOTON_EXPORT const char* photon_ext_cpu_isa() { return photon::cpu::simd().name; }
PHOTON_EXPORT const char* photon_ext_cpu_isa_error() { return photon::cpu::simd_error(); }

}  // extern "C"
