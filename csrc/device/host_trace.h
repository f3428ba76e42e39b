// What host and inline streams ran, and when: a bounded buffer of records, off by default. Off, a
// command costs one relaxed load more.
//
// Times are nanoseconds of std::chrono::steady_clock, which Python's time.perf_counter_ns reads too
// (CLOCK_MONOTONIC).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/host_backend.h"

namespace photon::device {

enum class Work : int32_t { kKernel, kCopy, kReplay, kWait };

struct WorkRecord {
  Work work;
  uint32_t stream;   // CpuStream::id
  int64_t begin_ns;  // kWait: when the stream began to wait for an event
  int64_t end_ns;
  uint64_t bytes;    // of a copy; nodes of a replayed graph; otherwise 0
  const char* name;  // of a kernel, with static lifetime; may be null
  int64_t cpu_ns;    // processor time of the stream's thread: less than end_ns - begin_ns where
                     // the thread slept or the system took it off its core
};

struct WorkTrace {
  std::vector<WorkRecord> records;  // as they ended
  uint64_t dropped = 0;             // records that found the buffer full
};

// One at a time, for all streams of the process. start raises std::runtime_error while it is on.
void start_host_trace(size_t capacity);
WorkTrace stop_host_trace();

// Records what runs between its construction and its destruction, if the trace is on at both.
class WorkTimer {
 public:
  WorkTimer(const KernelCommand& command, uint32_t stream);
  WorkTimer(const CopyCommand& command, uint32_t stream);
  WorkTimer(const ReplayCommand& command, uint32_t stream);
  WorkTimer(const WaitCommand& command, uint32_t stream);
  WorkTimer(const RecordCommand&, uint32_t) {
  }  // takes no time, and whoever it wakes may read the trace before it is in there
  ~WorkTimer();
  WorkTimer(const WorkTimer&) = delete;
  WorkTimer& operator=(const WorkTimer&) = delete;

 private:
  void begin(Work work, uint32_t stream, uint64_t bytes, const char* name);
  WorkRecord record_{};  // begin_ns 0: the trace was off
};

}  // namespace photon::device
