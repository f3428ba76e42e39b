#include "device/host_backend.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "common/spin.h"
#include "device/host_trace.h"
#include "device/text.h"

namespace photon::device {

// --- commands ------------------------------------------------------------------------------------

KernelCommand::KernelCommand(HostKernel function, const void* source, size_t bytes, const char* op)
    : kernel(function), name(op) {
  if (function == nullptr) throw std::invalid_argument("host stream: the kernel is a null pointer");
  if (bytes > kMaxParamBytes) {
    throw std::invalid_argument(text("host stream: a kernel's params have ", bytes,
                                     " bytes, at most ", kMaxParamBytes, " fit in a command"));
  }
  if (bytes != 0) std::memcpy(params, source, bytes);
}

void execute(const KernelCommand& command) { command.kernel(command.params); }
void execute(const CopyCommand& command) { std::memcpy(command.dst, command.src, command.bytes); }

// --- HostEvent -----------------------------------------------------------------------------------

HostEvent::HostEvent(Backend backend, bool timing, bool blocking)
    : Event(backend), timing_(timing), blocking_(blocking) {}

uint64_t HostEvent::begin_record(const Stream* stream, const char* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream != stream_ && !reached(recorded_)) {
    throw std::runtime_error(text("Stream.", call, ": the ", backend_name(backend()),
                                  " backend found its last use, on another stream, still in "
                                  "flight; use one per stream, or wait for it first"));
  }
  stream_ = stream;
  return ++recorded_;
}

uint64_t HostEvent::latest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

void HostEvent::complete(uint64_t sequence, SharedError error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (reached(sequence))
    return;  // two threads that fence one stream may enqueue out of order; the later fence covers
             // the earlier
  time_ = std::chrono::steady_clock::now();
  error_ = std::move(error);
  completed_.store(sequence, std::memory_order_release);
  changed_.notify_all();
}

SharedError HostEvent::await(uint64_t sequence, bool blocking) {
  const auto ready = [&] { return reached(sequence); };
  if (blocking) {
    spin_until(ready);
  } else {
    while (!ready()) cpu_relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, ready);
  return error_;
}

void HostEvent::raise_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) throw std::runtime_error(*error_);
}

bool HostEvent::query() {
  if (!reached(latest())) return false;
  raise_error();
  return true;
}

void HostEvent::synchronize() {
  const SharedError error = await(latest(), blocking_);
  if (error) throw std::runtime_error(*error);
}

double HostEvent::elapsed_ms(Event& since) {
  if (since.backend() != backend()) {
    throw std::invalid_argument(text("Event.elapsed_ms: a ", backend_name(backend()),
                                     " event and a ", backend_name(since.backend()), " event"));
  }
  const auto moment = [](HostEvent& event) {
    std::lock_guard<std::mutex> lock(event.mutex_);
    if (!event.timing_)
      throw std::runtime_error(
          "Event.elapsed_ms: the event was created without timing; pass timing=True");
    if (event.recorded_ == 0)
      throw std::runtime_error("Event.elapsed_ms: the event was never recorded");
    if (!event.reached(event.recorded_))
      throw std::runtime_error("Event.elapsed_ms: the event is not reached yet; synchronize first");
    return event.time_;
  };
  const auto start = moment(static_cast<HostEvent&>(since));
  return std::chrono::duration<double, std::milli>(moment(*this) - start).count();
}

// --- HostGraph -----------------------------------------------------------------------------------

HostGraph::HostGraph(Backend backend)
    : Graph(backend), finished_(std::make_shared<HostEvent>(backend, false, true)) {}

HostGraph::~HostGraph() { finished_->await(finished_->latest(), true); }

void HostGraph::replay(uint32_t stream) const {
  const auto timed = [stream](const auto& work) {
    const WorkTimer timer(work, stream);
    execute(work);
  };
  for (const GraphCommand& command : commands_) std::visit(timed, command);
}

// --- CpuStream -----------------------------------------------------------------------------------

namespace {

std::atomic<uint32_t> last_stream{0};

void push_to_stream(void* context, HostKernel kernel, const void* params, size_t bytes,
                    const char* name) {
  static_cast<CpuStream*>(context)->push(kernel, params, bytes, name);
}

template <class Derived, class Base>
std::shared_ptr<Derived> of_backend(const std::shared_ptr<Base>& object, Backend backend,
                                    const char* call) {
  if (!object) throw std::invalid_argument(text("Stream.", call, ": got nothing"));
  if (object->backend() != backend) {
    throw std::invalid_argument(text("Stream.", call, ": the stream is of backend '",
                                     backend_name(backend), "', the argument of backend '",
                                     backend_name(object->backend()), "'"));
  }
  return std::static_pointer_cast<Derived>(object);
}

}  // namespace

CpuStream::CpuStream(Backend backend)
    : Stream(backend, 0), queue_{push_to_stream, this}, id_(++last_stream) {}

void CpuStream::refuse_in_capture(const char* call) const {
  if (capturing_.load(std::memory_order_acquire)) {
    throw std::runtime_error(text(
        "Stream.", call, ": not possible while the stream is capturing; end the capture first"));
  }
}

void CpuStream::record(const std::shared_ptr<Event>& event) {
  refuse_in_capture("record");
  auto target = of_backend<HostEvent>(event, backend(), "record");
  const uint64_t sequence = target->begin_record(this, "record");
  submit(RecordCommand{std::move(target), sequence});
}

void CpuStream::wait(const std::shared_ptr<Event>& event) {
  refuse_in_capture("wait");
  auto target = of_backend<HostEvent>(event, backend(), "wait");
  const uint64_t sequence = target->latest();
  submit(WaitCommand{std::move(target), sequence});
}

void CpuStream::copy(void* dst, const void* src, size_t bytes) {
  const CopyCommand command{dst, src, bytes};
  capture_ ? capture_->append(command) : submit(command);
}

void CpuStream::check_copy(const void* dst, const void* src) const {
  if (dst == nullptr || src == nullptr)
    throw std::invalid_argument(
        text("Stream.copy: ", dst == nullptr ? "dst" : "src", " is a null address"));
}

void CpuStream::push(HostKernel kernel, const void* params, size_t bytes, const char* name) {
  if (capture_) {
    capture_->append(KernelCommand(kernel, params, bytes, name));
  } else {
    submit(KernelCommand(kernel, params, bytes, name));
  }
}

void CpuStream::begin_capture() {
  refuse_in_capture("begin_capture");
  capture_ = std::make_shared<HostGraph>(backend());
  capturing_.store(true, std::memory_order_release);
}

std::shared_ptr<Graph> CpuStream::end_capture() {
  if (!capture_)
    throw std::runtime_error(
        "Stream.end_capture: the stream is not capturing; call begin_capture first");
  capturing_.store(false, std::memory_order_release);
  return std::exchange(capture_, nullptr);
}

void CpuStream::launch(const std::shared_ptr<Graph>& graph) {
  refuse_in_capture("launch");
  const auto target = of_backend<HostGraph>(graph, backend(), "launch");
  submit(ReplayCommand{target.get(), target->finished(),
                       target->finished()->begin_record(this, "launch")});
}

// --- InlineStream --------------------------------------------------------------------------------

namespace {

struct RunNow {
  uint32_t stream;
  void operator()(const KernelCommand& command) const { execute(command); }
  void operator()(const CopyCommand& command) const { execute(command); }
  void operator()(const RecordCommand& command) const {
    command.event->complete(command.sequence, nullptr);
  }
  void operator()(const WaitCommand&) const {}  // what was recorded has run
  void operator()(const ReplayCommand& command) const {
    try {
      command.graph->replay(stream);
    } catch (...) {
      command.finished->complete(command.sequence, nullptr);
      throw;
    }
    command.finished->complete(command.sequence, nullptr);
  }
};

class HeapBuffer final : public PinnedBuffer {
 public:
  HeapBuffer(Backend backend, size_t bytes) : PinnedBuffer(backend, bytes) {
    data_ = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
  }
  ~HeapBuffer() override { std::free(data_); }

 private:
  static constexpr size_t kAlignment = 64;
};

}  // namespace

InlineStream::InlineStream() : CpuStream(Backend::kInline) {}

bool InlineStream::query() {
  refuse_in_capture("query");
  return true;
}

void InlineStream::submit(StreamCommand command) {
  const auto timed = [this](const auto& work) {
    const WorkTimer timer(work, id());
    RunNow{id()}(work);
  };
  std::visit(timed, command);
}

// --- factories -----------------------------------------------------------------------------------

std::shared_ptr<Stream> create_cpu_stream(Backend backend) {
  if (backend == Backend::kHost) return std::make_shared<HostStream>();
  return std::make_shared<InlineStream>();
}

std::shared_ptr<Event> create_cpu_event(Backend backend, bool timing, bool blocking) {
  return std::make_shared<HostEvent>(backend, timing, blocking);
}

std::shared_ptr<PinnedBuffer> create_cpu_pinned(Backend backend, size_t bytes) {
  return std::make_shared<HeapBuffer>(backend, bytes);
}

}  // namespace photon::device
