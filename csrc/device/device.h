// The device layer: streams, events, page-locked buffers and graphs behind one interface, free of
// torch and Python.
//
//   cuda    CUDA streams, events and graphs (static runtime; a build without CUDA has the names
//           and says what is missing)
//   host    a stream is a worker thread with a queue of C functions; the same order, events,
//           copies, capture and replay as on a GPU
//   inline  everything runs at the call, on the calling thread: for debugging, and for one-thread
//           use
//
// One thread enqueues on a stream at a time; any thread may wait. Addresses in device memory belong
// to the caller. Values that are wrong raise std::invalid_argument; wrong order, device failures
// and worker errors raise std::runtime_error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/host_queue.h"

namespace photon::device {

enum class Backend { kCuda, kHost, kInline };

Backend parse_backend(const std::string& name);
const char* backend_name(Backend backend);

// A point in a stream's order. Every method speaks of the most recent record; an event that was
// never recorded counts as complete.
class Event {
 public:
  virtual ~Event() = default;
  Backend backend() const { return backend_; }
  virtual bool query() = 0;        // true: reached. Raises the error of the work before it
  virtual void synchronize() = 0;  // blocks the calling thread; raises likewise
  virtual double elapsed_ms(Event& since) = 0;

 protected:
  explicit Event(Backend backend) : backend_(backend) {}

 private:
  const Backend backend_;
};

// Zeroed memory that asynchronous copies may read and write. Whoever frees it has waited for the
// copies that use it.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  Backend backend() const { return backend_; }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 protected:
  PinnedBuffer(Backend backend, size_t bytes) : backend_(backend), bytes_(bytes) {}
  void* data_ = nullptr;

 private:
  const Backend backend_;
  const size_t bytes_;
};

// A recorded list of kernels and copies. It is replayed on one stream at a time. Destroying it
// waits for its replays in flight and only then drops what it keeps alive.
class Graph {
 public:
  virtual ~Graph() = default;
  Backend backend() const { return backend_; }
  virtual size_t nodes() const = 0;
  void keep_alive(std::shared_ptr<void> object) { kept_.push_back(std::move(object)); }

 protected:
  explicit Graph(Backend backend) : backend_(backend) {}

 private:
  const Backend backend_;
  std::vector<std::shared_ptr<void>> kept_;
};

// An ordered queue of work. Destroying a stream of our own drains it first.
class Stream {
 public:
  virtual ~Stream() = default;
  Backend backend() const { return backend_; }
  int device() const { return device_; }
  virtual uintptr_t handle() const { return 0; }  // the cudaStream_t; 0 for host and inline
  virtual uint32_t id() const {
    return 0;
  }  // host and inline: its number in traces, from 1 on; 0 for cuda

  virtual void record(const std::shared_ptr<Event>& event) = 0;
  virtual void wait(const std::shared_ptr<Event>& event) = 0;
  virtual void synchronize() = 0;
  virtual bool query() = 0;  // true: everything enqueued so far has run

  // Asynchronous copy. It trusts its addresses, as check_copy asks the driver about them, which
  // costs more than the copy's enqueue: check_copy raises where a copy would not be asynchronous
  // (cuda: a host address that is not page-locked), or an address is null.
  virtual void copy(void* dst, const void* src, size_t bytes) = 0;
  virtual void check_copy(const void* dst, const void* src) const = 0;

  // Between the two, work is recorded and not executed; events are refused. end_capture leaves
  // capture mode even when it raises.
  virtual void begin_capture() = 0;
  virtual std::shared_ptr<Graph> end_capture() = 0;
  virtual void launch(const std::shared_ptr<Graph>& graph) = 0;

  // Where photon's CPU ops go while this stream is claimed; null on cuda, whose ops take the stream
  // from torch.
  virtual const HostQueue* queue() const { return nullptr; }

 protected:
  Stream(Backend backend, int device) : backend_(backend), device_(device) {}

 private:
  const Backend backend_;
  const int device_;
};

std::shared_ptr<Stream> create_stream(Backend backend, int device);
std::shared_ptr<Stream> wrap_stream(uintptr_t cuda_stream, int device);  // does not own it
std::shared_ptr<Event> create_event(Backend backend, bool timing, bool blocking, int device);
std::shared_ptr<PinnedBuffer> create_pinned(Backend backend, size_t bytes);
std::shared_ptr<Graph> graph_from_cuda(
    uintptr_t cuda_graph, int device);  // instantiates; the caller keeps owning cuda_graph

bool cuda_compiled();
int cuda_device_count();  // 0 without a device, a driver, or CUDA in this build

}  // namespace photon::device
