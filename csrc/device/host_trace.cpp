#include "device/host_trace.h"

#include <time.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace photon::device {

namespace {

std::atomic<bool> recording{false};

// Never destroyed: workers may outlive static storage at process exit.
struct Buffer {
  std::mutex mutex;
  WorkTrace trace;      // guarded by mutex
  size_t capacity = 0;  // guarded by mutex
};

Buffer& buffer() {
  static Buffer* const instance = new Buffer;
  return *instance;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

void start_host_trace(size_t capacity) {
  Buffer& target = buffer();
  std::lock_guard<std::mutex> lock(target.mutex);
  if (recording.load(std::memory_order_relaxed))
    throw std::runtime_error("start_host_trace: the trace is on already; stop it first");
  target.trace = WorkTrace{};
  target.trace.records.reserve(capacity);
  target.capacity = capacity;
  recording.store(true, std::memory_order_release);
}

WorkTrace stop_host_trace() {
  Buffer& target = buffer();
  std::lock_guard<std::mutex> lock(target.mutex);
  recording.store(false, std::memory_order_release);
  return std::exchange(target.trace, WorkTrace{});
}

WorkTimer::WorkTimer(const KernelCommand& command, uint32_t stream) {
  begin(Work::kKernel, stream, 0, command.name);
}
WorkTimer::WorkTimer(const CopyCommand& command, uint32_t stream) {
  begin(Work::kCopy, stream, command.bytes, nullptr);
}
WorkTimer::WorkTimer(const ReplayCommand& command, uint32_t stream) {
  begin(Work::kReplay, stream, command.graph->nodes(), nullptr);
}
WorkTimer::WorkTimer(const WaitCommand&, uint32_t stream) {
  begin(Work::kWait, stream, 0, nullptr);
}

void WorkTimer::begin(Work work, uint32_t stream, uint64_t bytes, const char* name) {
  if (!recording.load(std::memory_order_relaxed)) return;
  record_ = {work, stream, now_ns(), 0, bytes, name, thread_cpu_ns()};
}

WorkTimer::~WorkTimer() {
  if (record_.begin_ns == 0) return;
  record_.end_ns = now_ns();
  record_.cpu_ns = thread_cpu_ns() - record_.cpu_ns;
  Buffer& target = buffer();
  std::lock_guard<std::mutex> lock(target.mutex);
  if (!recording.load(std::memory_order_relaxed)) return;
  if (target.trace.records.size() < target.capacity) {
    target.trace.records.push_back(record_);
  } else {
    ++target.trace.dropped;
  }
}

}  // namespace photon::device
