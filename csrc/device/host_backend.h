// The host and inline backends: what CUDA's streams, events and graphs do, for C functions on the
// CPU.
//
// Commands are small values: a kernel is a function pointer and a copy of its params, so nothing is
// allocated per command once a stream's queue has grown to its working size. A worker runs plain
// C++ only: it needs neither the GIL nor torch.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "device/device.h"

namespace photon::device {

class HostEvent;
class HostGraph;

using SharedError = std::shared_ptr<const std::string>;  // null: no error

constexpr size_t kMaxParamBytes =
    512;  // the largest params struct of common/params.h takes about 300

struct KernelCommand {
  KernelCommand(HostKernel function, const void* source, size_t bytes, const char* op);
  HostKernel kernel;
  const char* name;  // see HostQueue::push
  alignas(16) std::byte params[kMaxParamBytes];
};

struct CopyCommand {
  void* dst;
  const void* src;
  size_t bytes;
};

struct RecordCommand {
  std::shared_ptr<HostEvent> event;
  uint64_t sequence;
};

struct WaitCommand {
  std::shared_ptr<HostEvent> event;
  uint64_t sequence;
};

// The graph outlives the command: its destructor waits for `finished`.
struct ReplayCommand {
  const HostGraph* graph;
  std::shared_ptr<HostEvent> finished;
  uint64_t sequence;
};

using GraphCommand = std::variant<KernelCommand, CopyCommand>;
using StreamCommand =
    std::variant<KernelCommand, CopyCommand, RecordCommand, WaitCommand, ReplayCommand>;

void execute(const KernelCommand& command);
void execute(const CopyCommand& command);

// Records are numbered, so that a wait refers to the record that was the latest when the wait was
// enqueued.
class HostEvent final : public Event {
 public:
  HostEvent(Backend backend, bool timing, bool blocking);

  bool query() override;
  void synchronize() override;
  double elapsed_ms(Event& since) override;

  // The enqueuing side. An event may move to another stream only once its last record was reached:
  // numbers complete in order.
  uint64_t begin_record(const Stream* stream, const char* call);
  uint64_t latest() const;

  // The executing side. A record on a failed stream completes with that stream's error.
  void complete(uint64_t sequence, SharedError error);
  SharedError await(uint64_t sequence, bool blocking);

 private:
  bool reached(uint64_t sequence) const {
    return completed_.load(std::memory_order_acquire) >= sequence;
  }
  void raise_error();

  const bool timing_, blocking_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0;               // guarded by mutex_
  const Stream* stream_ = nullptr;      // guarded by mutex_; compared, never followed
  std::atomic<uint64_t> completed_{0};  // written under mutex_
  std::chrono::steady_clock::time_point time_{};
  SharedError error_;
};

class HostGraph final : public Graph {
 public:
  explicit HostGraph(Backend backend);
  ~HostGraph() override;
  size_t nodes() const override { return commands_.size(); }
  void append(GraphCommand command) { commands_.push_back(std::move(command)); }
  void replay(uint32_t stream) const;  // the stream that runs it, for the trace
  const std::shared_ptr<HostEvent>& finished() const { return finished_; }

 private:
  std::vector<GraphCommand> commands_;
  std::shared_ptr<HostEvent> finished_;
};

// What host and inline streams share: capture, checks and the queue that a claim hands to the ops
// library.
class CpuStream : public Stream {
 public:
  void record(const std::shared_ptr<Event>& event) final;
  void wait(const std::shared_ptr<Event>& event) final;
  void copy(void* dst, const void* src, size_t bytes) final;
  void check_copy(const void* dst, const void* src) const final;
  void begin_capture() final;
  std::shared_ptr<Graph> end_capture() final;
  void launch(const std::shared_ptr<Graph>& graph) final;
  const HostQueue* queue() const final { return &queue_; }
  uint32_t id() const final { return id_; }

  // Enqueues (or records) `kernel` with a copy of its params.
  void push(HostKernel kernel, const void* params, size_t bytes, const char* name);

 protected:
  explicit CpuStream(Backend backend);
  virtual void submit(StreamCommand command) = 0;
  void refuse_in_capture(const char* call) const;

 private:
  const HostQueue queue_;
  const uint32_t id_;
  std::atomic<bool> capturing_{false};  // read by threads that synchronize
  std::shared_ptr<HostGraph> capture_;
};

// A worker thread and its queue. The worker takes all pending commands at once, spins briefly when
// there are none, then sleeps. After an error it skips kernels and copies but still completes
// events, so that whoever waits gets the error instead of hanging.
class HostStream final : public CpuStream {
 public:
  HostStream();
  ~HostStream() override;
  void synchronize() override;
  bool query() override;

 protected:
  void submit(StreamCommand command) override;

 private:
  bool forked() const;
  uint64_t enqueue(
      StreamCommand command);  // returns how many commands have been enqueued, this one included
  void drain();
  void work();
  bool take(std::vector<StreamCommand>& batch);
  void run(StreamCommand& command);
  void run_guarded(const KernelCommand& command);
  void run_guarded(const CopyCommand& command);
  void run_guarded(const RecordCommand& command);
  void run_guarded(const WaitCommand& command);
  void run_guarded(const ReplayCommand& command);
  void fail(const std::string& message);

  friend void drain_host_streams();

  std::mutex mutex_;
  std::unique_ptr<std::condition_variable>
      wake_;  // given up in a forked child, where a waiter that is not there would hold its end
  std::vector<StreamCommand> pending_;  // guarded by mutex_
  bool sleeping_ = false;               // guarded by mutex_
  bool stopping_ = false;               // guarded by mutex_
  std::atomic<uint64_t> enqueued_{0};   // written under mutex_
  std::atomic<uint64_t> executed_{0};   // written by the worker
  std::atomic<bool> failed_{false};     // written by the worker
  SharedError error_;                   // written once by the worker, before failed_
  const std::shared_ptr<HostEvent> fence_;
  const uint64_t born_;                  // forks before this stream was made
  std::unique_ptr<std::thread> worker_;  // given up in a forked child
};

class InlineStream final : public CpuStream {
 public:
  InlineStream();
  void synchronize() override { refuse_in_capture("synchronize"); }
  bool query() override;

 protected:
  void submit(StreamCommand command) override;
};

std::shared_ptr<Stream> create_cpu_stream(Backend backend);
std::shared_ptr<Event> create_cpu_event(Backend backend, bool timing, bool blocking);
std::shared_ptr<PinnedBuffer> create_cpu_pinned(Backend backend, size_t bytes);

// Waits until every host stream is idle: called at interpreter exit, before the libraries whose
// kernels they run are torn down.
void drain_host_streams();

}  // namespace photon::device
