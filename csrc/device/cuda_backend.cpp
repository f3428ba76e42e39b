// Streams, events, pinned memory and graphs over the CUDA runtime, linked statically: handles are
// the driver's, so they mix with torch's.
#ifdef PHOTON_WITH_CUDA
#include "device/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/spin.h"
#include "device/cuda_error.h"
#include "device/text.h"

namespace photon::device {

bool cuda_compiled() { return true; }

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

namespace cuda {

namespace {

template <class Derived, class Base>
Derived& of_cuda(const std::shared_ptr<Base>& object, const char* call) {
  if (!object) throw std::invalid_argument(text("Stream.", call, ": got nothing"));
  if (object->backend() != Backend::kCuda) {
    throw std::invalid_argument(text("Stream.", call,
                                     ": the stream is of backend 'cuda', the argument of backend '",
                                     backend_name(object->backend()), "'"));
  }
  return static_cast<Derived&>(*object);
}

// A thread that sleeps in the driver was seen to wake half a millisecond late on a virtual machine,
// as long as a whole step may take.
constexpr std::chrono::microseconds kSpinBeforeSleep{1000};

class CudaEvent final : public Event {
 public:
  CudaEvent(bool timing, bool blocking, int device)
      : Event(Backend::kCuda), device_(device), blocking_(blocking) {
    const DeviceScope scope(device);
    const unsigned flags =
        (timing ? 0u : cudaEventDisableTiming) | (blocking ? cudaEventBlockingSync : 0u);
    check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
  }
  ~CudaEvent() override {
    const RelaxedCapture relaxed;
    cudaEventDestroy(event_);
  }

  cudaEvent_t get() const { return event_; }

  bool query() override {
    const RelaxedCapture relaxed;
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(status, "cudaEventQuery");
    return true;
  }

  void synchronize() override {
    if (blocking_) spin_until([this] { return query(); }, kSpinBeforeSleep);
    const DeviceScope scope(device_);
    const RelaxedCapture relaxed;
    check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }

  double elapsed_ms(Event& since) override {
    if (since.backend() != Backend::kCuda) {
      throw std::invalid_argument(
          text("Event.elapsed_ms: a cuda event and a ", backend_name(since.backend()), " event"));
    }
    float elapsed = 0.0f;
    check(cudaEventElapsedTime(&elapsed, static_cast<CudaEvent&>(since).event_, event_),
          "cudaEventElapsedTime");
    return elapsed;
  }

 private:
  const int device_;
  const bool blocking_;
  cudaEvent_t event_ = nullptr;
};

class CudaBuffer final : public PinnedBuffer {
 public:
  explicit CudaBuffer(size_t bytes) : PinnedBuffer(Backend::kCuda, bytes) {
    check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(data_, 0, bytes);
  }
  ~CudaBuffer() override {
    const RelaxedCapture relaxed;
    cudaFreeHost(data_);
  }
};

class CudaGraph final : public Graph {
 public:
  CudaGraph(cudaGraph_t graph, int device) : Graph(Backend::kCuda), device_(device) {
    const DeviceScope scope(device);
    check(cudaGraphGetNodes(graph, nullptr, &nodes_), "cudaGraphGetNodes");
    check(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
  }
  ~CudaGraph() override {
    const RelaxedCapture relaxed;
    for (const auto& stream : launched_on_)
      cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream->handle()));
    cudaGraphExecDestroy(exec_);
  }
  size_t nodes() const override { return nodes_; }
  int device() const { return device_; }

  void launch(const std::shared_ptr<Stream>& stream, cudaStream_t handle) {
    check(cudaGraphLaunch(exec_, handle), "cudaGraphLaunch");
    if (std::find(launched_on_.begin(), launched_on_.end(), stream) == launched_on_.end())
      launched_on_.push_back(stream);
  }
  void upload(cudaStream_t handle) { check(cudaGraphUpload(exec_, handle), "cudaGraphUpload"); }

 private:
  const int device_;
  cudaGraphExec_t exec_ = nullptr;
  size_t nodes_ = 0;
  std::vector<std::shared_ptr<Stream>> launched_on_;  // all that the destructor has to wait for
};

struct GraphGuard {
  ~GraphGuard() {
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  cudaGraph_t graph = nullptr;
};

void require_page_locked(const char* name, const void* address) {
  if (address == nullptr)
    throw std::invalid_argument(text("Stream.copy: ", name, " is a null address"));
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw std::invalid_argument(text("Stream.copy: ", name, " ", address,
                                     " is host memory that is not page-locked, so the copy would "
                                     "block; use a PinnedBuffer or tensor.pin_memory()"));
  }
}

class CudaStream final : public Stream, public std::enable_shared_from_this<CudaStream> {
 public:
  CudaStream(cudaStream_t stream, int device, bool owned)
      : Stream(Backend::kCuda, device), stream_(stream), owned_(owned) {}

  ~CudaStream() override {
    const RelaxedCapture relaxed;
    if (capturing_) {
      GraphGuard abandoned;
      cudaStreamEndCapture(stream_, &abandoned.graph);
    }
    if (!owned_) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  uintptr_t handle() const override { return reinterpret_cast<uintptr_t>(stream_); }

  void record(const std::shared_ptr<Event>& event) override {
    refuse_in_capture("record");
    const auto& target = of_cuda<CudaEvent>(event, "record");
    const DeviceScope scope(device());
    check(cudaEventRecord(target.get(), stream_), "cudaEventRecord");
  }

  void wait(const std::shared_ptr<Event>& event) override {
    refuse_in_capture("wait");
    const auto& target = of_cuda<CudaEvent>(event, "wait");
    const DeviceScope scope(device());
    check(cudaStreamWaitEvent(stream_, target.get(), 0), "cudaStreamWaitEvent");
  }

  void synchronize() override {
    refuse_in_capture("synchronize");
    const DeviceScope scope(device());
    const RelaxedCapture relaxed;
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  bool query() override {
    refuse_in_capture("query");
    const RelaxedCapture relaxed;
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(status, "cudaStreamQuery");
    return true;
  }

  void copy(void* dst, const void* src, size_t bytes) override {
    const DeviceScope scope(device());
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }

  void check_copy(const void* dst, const void* src) const override {
    const DeviceScope scope(device());
    require_page_locked("dst", dst);
    require_page_locked("src", src);
  }

  // Thread-local mode: what other threads do meanwhile neither breaks the capture nor is recorded.
  void begin_capture() override {
    refuse_in_capture("begin_capture");
    if (stream_ == nullptr)
      throw std::runtime_error(
          "Stream.begin_capture: the default stream cannot be captured; use a stream of its own");
    const DeviceScope scope(device());
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    capturing_ = true;
  }

  std::shared_ptr<Graph> end_capture() override {
    if (!capturing_)
      throw std::runtime_error(
          "Stream.end_capture: the stream is not capturing; call begin_capture first");
    capturing_ = false;
    const DeviceScope scope(device());
    GraphGuard captured;
    check(cudaStreamEndCapture(stream_, &captured.graph), "cudaStreamEndCapture");
    auto graph = std::make_shared<CudaGraph>(captured.graph, device());
    graph->upload(stream_);
    return graph;
  }

  void launch(const std::shared_ptr<Graph>& graph) override {
    refuse_in_capture("launch");
    auto& target = of_cuda<CudaGraph>(graph, "launch");
    if (target.device() != device()) {
      throw std::invalid_argument(text("Stream.launch: the graph is of device ", target.device(),
                                       ", the stream of device ", device()));
    }
    const DeviceScope scope(device());
    target.launch(shared_from_this(), stream_);
  }

 private:
  void refuse_in_capture(const char* call) const {
    if (capturing_)
      throw std::runtime_error(text(
          "Stream.", call, ": not possible while the stream is capturing; end the capture first"));
  }

  const cudaStream_t stream_;
  const bool owned_;
  bool capturing_ = false;
};

}  // namespace

std::shared_ptr<Stream> create_stream(int device) {
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return std::make_shared<CudaStream>(stream, device, true);
}

std::shared_ptr<Stream> wrap_stream(uintptr_t handle, int device) {
  return std::make_shared<CudaStream>(reinterpret_cast<cudaStream_t>(handle), device, false);
}

std::shared_ptr<Event> create_event(bool timing, bool blocking, int device) {
  return std::make_shared<CudaEvent>(timing, blocking, device);
}

std::shared_ptr<PinnedBuffer> create_pinned(size_t bytes) {
  return std::make_shared<CudaBuffer>(bytes);
}

std::shared_ptr<Graph> graph_from_raw(uintptr_t graph, int device) {
  return std::make_shared<CudaGraph>(reinterpret_cast<cudaGraph_t>(graph), device);
}

}  // namespace cuda
}  // namespace photon::device
#endif  // PHOTON_WITH_CUDA
