// Which ops were asked for their Hopper kernel and ran the portable one, and why: each pair of op
// and reason once per process. Noting a known pair takes no lock, so a launcher may do it inside of
// a graph capture, and a call whose Hopper kernel runs does not come here at all.
#pragma once
#include <atomic>
#include <cstring>
#include <mutex>

#include "gpu.h"

namespace photon {

// Both are string literals.
struct Fallback {
  const char* op;
  const char* reason;
};

class Fallbacks {
 public:
  void note(const Fallback& one) {
    if (is_known(one)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const int count = count_.load(std::memory_order_relaxed);
    if (is_known(one) || count == kMost) return;
    noted_[count] = one;
    count_.store(count + 1, std::memory_order_release);
  }

  // Null fields past the last one.
  Fallback at(int index) const {
    const bool is_there = index >= 0 && index < count_.load(std::memory_order_acquire);
    return is_there ? noted_[index] : Fallback{nullptr, nullptr};
  }

 private:
  static constexpr int kMost = 128;  // more than there are pairs of op and reason

  bool is_known(const Fallback& one) const {
    const int count = count_.load(std::memory_order_acquire);
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(noted_[i].op, one.op) == 0 && std::strcmp(noted_[i].reason, one.reason) == 0)
        return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::atomic<int> count_{0};
  Fallback noted_[kMost] = {};
};

inline Fallbacks& fallbacks() {
  static Fallbacks instance;
  return instance;
}

// Whether an op's Hopper kernel runs, which was asked for. `why`: why it cannot.
inline bool runs_hopper(const char* op, const Unsupported& why) {
  if (why) fallbacks().note({op, why.reason});
  return !why;
}

}  // namespace photon
