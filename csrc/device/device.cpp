#include "device/device.h"

#include <stdexcept>

#include "device/cuda_backend.h"
#include "device/host_backend.h"
#include "device/text.h"

namespace photon::device {

Backend parse_backend(const std::string& name) {
  if (name == "cuda") return Backend::kCuda;
  if (name == "host") return Backend::kHost;
  if (name == "inline") return Backend::kInline;
  throw std::invalid_argument(text("backend is '", name, "', expected 'cuda', 'host' or 'inline'"));
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kCuda:
      return "cuda";
    case Backend::kHost:
      return "host";
    case Backend::kInline:
      return "inline";
  }
  return "unknown";
}

std::shared_ptr<Stream> create_stream(Backend backend, int device) {
  if (backend == Backend::kCuda) return cuda::create_stream(device);
  if (device != 0)
    throw std::invalid_argument(text("Stream: device is ", device, ", the ", backend_name(backend),
                                     " backend has device 0 only"));
  return create_cpu_stream(backend);
}

std::shared_ptr<Stream> wrap_stream(uintptr_t cuda_stream, int device) {
  return cuda::wrap_stream(cuda_stream, device);
}

std::shared_ptr<Event> create_event(Backend backend, bool timing, bool blocking, int device) {
  if (backend == Backend::kCuda) return cuda::create_event(timing, blocking, device);
  return create_cpu_event(backend, timing, blocking);
}

std::shared_ptr<PinnedBuffer> create_pinned(Backend backend, size_t bytes) {
  if (bytes == 0 || bytes % sizeof(int32_t) != 0) {
    throw std::invalid_argument(text("PinnedBuffer: nbytes is ", bytes,
                                     ", expected a positive multiple of 4 (it holds int32 words)"));
  }
  return backend == Backend::kCuda ? cuda::create_pinned(bytes) : create_cpu_pinned(backend, bytes);
}

std::shared_ptr<Graph> graph_from_cuda(uintptr_t cuda_graph, int device) {
  if (cuda_graph == 0) {
    throw std::invalid_argument(
        "Graph.from_cuda: the handle is 0; capture with torch.cuda.CUDAGraph(keep_graph=True) and "
        "pass raw_cuda_graph()");
  }
  return cuda::graph_from_raw(cuda_graph, device);
}

#ifndef PHOTON_WITH_CUDA

bool cuda_compiled() { return false; }
int cuda_device_count() { return 0; }

namespace cuda {

namespace {
[[noreturn]] void missing() {
  throw std::runtime_error(
      "the cuda backend is not in this build: install the CUDA toolkit (nvcc), rebuild with "
      "PHOTON_CUDA=1, or use backend 'host'");
}
}  // namespace

std::shared_ptr<Stream> create_stream(int) { missing(); }
std::shared_ptr<Stream> wrap_stream(uintptr_t, int) { missing(); }
std::shared_ptr<Event> create_event(bool, bool, int) { missing(); }
std::shared_ptr<PinnedBuffer> create_pinned(size_t) { missing(); }
std::shared_ptr<Graph> graph_from_raw(uintptr_t, int) { missing(); }

}  // namespace cuda

#endif

}  // namespace photon::device
