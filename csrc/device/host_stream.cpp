// HostStream: the worker thread and its queue.
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "common/spin.h"
#include "device/host_backend.h"
#include "device/host_trace.h"
#include "device/text.h"

namespace photon::device {

namespace {

constexpr size_t kInitialQueue = 64;

// The live streams, for drain_host_streams. Never destroyed: streams may outlive static storage at
// process exit.
struct Registry {
  std::mutex mutex;
  std::vector<HostStream*> streams;
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

// How often this process is a fork of one that had streams. A stream made under another count has
// its worker in another process.
std::atomic<uint64_t> fork_count{0};

uint64_t watch_forks() {
  static const int installed = pthread_atfork(nullptr, nullptr, [] {
    fork_count.fetch_add(1, std::memory_order_relaxed);
    new (&registry())
        Registry;  // its mutex may have been held, and its streams have no workers here
  });
  static_cast<void>(installed);
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace

HostStream::HostStream()
    : CpuStream(Backend::kHost),
      wake_(std::make_unique<std::condition_variable>()),
      fence_(std::make_shared<HostEvent>(Backend::kHost, false, true)),
      born_(watch_forks()) {
  pending_.reserve(kInitialQueue);
  worker_ = std::make_unique<std::thread>([this] { work(); });
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams.push_back(this);
}

HostStream::~HostStream() {
  if (forked()) {
    static_cast<void>(worker_.release());
    static_cast<void>(wake_.release());
    return;
  }
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto& streams = registry().streams;
    streams.erase(std::remove(streams.begin(), streams.end(), this), streams.end());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wake_->notify_one();
  }
  worker_->join();
}

bool HostStream::forked() const { return born_ != fork_count.load(std::memory_order_relaxed); }

void HostStream::submit(StreamCommand command) { enqueue(std::move(command)); }

uint64_t HostStream::enqueue(StreamCommand command) {
  if (forked()) {
    throw std::runtime_error(  // torch's threads do not survive a fork: what uses them waits for
                               // ever
        "this host stream belongs to the process that was forked; use a fresh process instead "
        "(multiprocessing's 'spawn'), "
        "or call torch.set_num_threads(1) here and then make a new Runtime, or Engine");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(command));
  const uint64_t ticket = enqueued_.fetch_add(1, std::memory_order_release) + 1;
  if (sleeping_) wake_->notify_one();
  return ticket;
}

void HostStream::drain() {
  const uint64_t sequence = fence_->begin_record(this, "synchronize");
  const uint64_t ticket = enqueue(RecordCommand{fence_, sequence});
  fence_->await(sequence, true);
  while (executed_.load(std::memory_order_acquire) < ticket)
    std::this_thread::yield();  // counted a moment later; query() looks there
}

void HostStream::synchronize() {
  refuse_in_capture("synchronize");
  drain();
  if (failed_.load(std::memory_order_acquire)) throw std::runtime_error(*error_);
}

bool HostStream::query() {
  refuse_in_capture("query");
  if (failed_.load(std::memory_order_acquire)) throw std::runtime_error(*error_);
  return executed_.load(std::memory_order_acquire) == enqueued_.load(std::memory_order_acquire);
}

void HostStream::work() {
  std::vector<StreamCommand> batch;
  batch.reserve(kInitialQueue);
  while (take(batch)) {
    for (StreamCommand& command : batch) {
      run(command);
      executed_.fetch_add(1, std::memory_order_release);
    }
    batch.clear();
  }
}

// Swaps the pending commands into `batch`; false once the stream is stopping and nothing is left.
bool HostStream::take(std::vector<StreamCommand>& batch) {
  spin_until([this] {
    return enqueued_.load(std::memory_order_acquire) != executed_.load(std::memory_order_relaxed);
  });
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_ = true;
  wake_->wait(lock, [this] { return !pending_.empty() || stopping_; });
  sleeping_ = false;
  batch.swap(pending_);
  return !batch.empty();
}

void HostStream::run(StreamCommand& command) {
  const auto timed = [this](const auto& work) {
    const WorkTimer timer(work, id());
    run_guarded(work);
  };
  std::visit(timed, command);
}

void HostStream::run_guarded(const KernelCommand& command) {
  if (error_) return;
  try {
    execute(command);
  } catch (const std::exception& error) {
    fail(text("host stream: a kernel failed: ", error.what()));
  } catch (...) {
    fail("host stream: a kernel failed with something that is not a std::exception");
  }
}

void HostStream::run_guarded(const CopyCommand& command) {
  if (!error_) execute(command);
}

void HostStream::run_guarded(const RecordCommand& command) {
  command.event->complete(command.sequence, error_);
}

void HostStream::run_guarded(const WaitCommand& command) {
  const SharedError upstream = command.event->await(command.sequence, true);
  if (upstream) fail(*upstream);
}

void HostStream::run_guarded(const ReplayCommand& command) {
  if (!error_) {
    try {
      command.graph->replay(id());
    } catch (const std::exception& error) {
      fail(text("host stream: a kernel of a replayed graph failed: ", error.what()));
    } catch (...) {
      fail(
          "host stream: a kernel of a replayed graph failed with something that is not a "
          "std::exception");
    }
  }
  command.finished->complete(command.sequence, error_);
}

void HostStream::fail(const std::string& message) {
  if (error_) return;
  error_ = std::make_shared<const std::string>(message);
  failed_.store(true, std::memory_order_release);
}

void drain_host_streams() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (HostStream* stream : registry().streams) stream->drain();
}

}  // namespace photon::device
