// From checked params to a kernel: a CPU kernel runs here, or is handed to the host stream that has
// claimed this thread; a CUDA kernel is launched on torch's current stream of the tensors' device;
// Meta tensors have no kernel.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#ifdef PHOTON_EMULATED_CUDA
#include <cuda_runtime_api.h>
#endif

#include <optional>

#include "common/host_queue.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "ops/checks.h"

namespace photon::ops {

// The host queue that has claimed this thread, or null.
const HostQueue* claimed_queue();

// Makes `device` current for this scope, and knows torch's current stream of it. torch goes back to
// the device that was current before: the runtime's own cudaSetDevice() would make a context there,
// on a GPU that the process may not use at all.
class CudaScope {
 public:
  CudaScope(const char* op, DeviceId device);
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  void* stream() const { return stream_; }
  void check_launch(int error) const;

 private:
  const char* op_;
  std::optional<torch::stable::accelerator::DeviceGuard> other_device_;  // if another was current
  void* stream_ = nullptr;
};

template <typename Params>
struct Launcher {
  using Type = int (*)(const Params&, void* stream);
};

// `anchor`: any argument of the op; it knows the op's name and its device. `launch` is null in a
// build without CUDA.
template <auto kCpuKernel, typename Params>
void dispatch(const Arg& anchor, const Params& params, typename Launcher<Params>::Type launch) {
  if (anchor.device().type == aoti_torch_device_type_meta()) return;
  if (anchor.device().type == aoti_torch_device_type_cpu()) {
    const HostQueue* queue = claimed_queue();
    if (queue == nullptr) return kCpuKernel(params);
    const HostKernel kernel = [](const void* copy) {
      kCpuKernel(*static_cast<const Params*>(copy));
    };
    return queue->push(queue->context, kernel, &params, sizeof(Params), anchor.op());
  }
  if (launch == nullptr) {
    fail(anchor.op(), anchor.name(),
         " is on a CUDA device, but photon_ext was built without CUDA kernels; build it where nvcc "
         "is found");
  }
  const CudaScope scope(anchor.op(), anchor.device());
  scope.check_launch(launch(params, scope.stream()));
}

}  // namespace photon::ops

#if defined(PHOTON_EMULATED_CUDA)
// For tests without a GPU: the CUDA kernel, compiled for tests/emulator, in the place of the CPU
// kernel.
namespace photon::ops {

template <auto kLauncher, typename Params>
void emulate(const Params& params) {
  const int error = kLauncher(params, nullptr);
  if (error != 0) throw std::runtime_error(cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace photon::ops

#define PHOTON_DISPATCH(kernel, anchor, params) \
  dispatch<&emulate<&cuda::kernel, decltype(params)>>(anchor, params, nullptr)
#elif defined(PHOTON_WITH_CUDA)
#define PHOTON_DISPATCH(kernel, anchor, params) \
  dispatch<&cpu::kernel>(anchor, params, &cuda::kernel)
#else
#define PHOTON_DISPATCH(kernel, anchor, params) dispatch<&cpu::kernel>(anchor, params, nullptr)
#endif

// One function per op serves the three dispatch keys; `register_ops` adds a family's functions to a
// library.
#define PHOTON_REGISTER(register_ops)                                 \
  STABLE_TORCH_LIBRARY_IMPL(photon_ext, CPU, m) { register_ops(m); }  \
  STABLE_TORCH_LIBRARY_IMPL(photon_ext, CUDA, m) { register_ops(m); } \
  STABLE_TORCH_LIBRARY_IMPL(photon_ext, Meta, m) { register_ops(m); }
