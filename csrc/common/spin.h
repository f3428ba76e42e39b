// Spin briefly before sleeping: a wake-up costs more than most gaps between two commands of a step.
#pragma once
#include <chrono>
#include <thread>

namespace photon {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

constexpr std::chrono::microseconds kSpinTime{20};

// True as soon as ready() is; false when the spin time is over. A machine of one core has nobody to
// wait for.
template <class Ready>
bool spin_until(Ready ready, std::chrono::microseconds time = kSpinTime) {
  static const bool alone = std::thread::hardware_concurrency() <= 1;
  if (ready()) return true;
  if (alone) return false;
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  }
  return ready();
}

}  // namespace photon
