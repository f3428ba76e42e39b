#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "common/spin.h"
#include "cpu/quota.h"

namespace photon::cpu {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kChunksPerThread =
    4;  // enough to even out a slow thread, few enough that claims cost nothing
constexpr auto kHelperSpinTime =
    std::chrono::microseconds(60);  // the kernels of a step follow each other within microseconds

int default_threads() {
  if (const char* text = std::getenv("PHOTON_NUM_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted > 0) return std::min(wanted, kMaxThreads);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const int quota = quota_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  return std::clamp(quota > 0 ? std::min(cores, quota) : cores, 1, kMaxThreads);
}

// One job at a time. `claims_` packs (job number, chunks not yet claimed), so that a claim can only
// succeed for the job whose fields the helper has read: the fields are rewritten only after every
// chunk of their job was claimed and finished.
class Pool {
 public:
  explicit Pool(int threads) { resize(threads); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int threads) {
    const std::lock_guard<std::mutex> lock(resizing_);
    {
      const std::lock_guard<std::mutex> sleep_lock(sleeping_);
      threads_.store(threads);
    }
    wake_.notify_all();
    while (static_cast<int>(helpers_.size()) > threads - 1) {
      helpers_.back().join();
      helpers_.pop_back();
    }
    while (static_cast<int>(helpers_.size()) < threads - 1) {
      const int index = static_cast<int>(helpers_.size());
      try {
        helpers_.emplace_back([this, index] { help(index); });
      } catch (const std::system_error&) {  // no more threads to be had: work with those there are
        threads_.store(index + 1);
        return;
      }
    }
  }

  void run(int64_t n, int64_t grain, RangeFunction function, const void* context) {
    const int64_t threads = this->threads();
    if (threads == 1 || n <= grain || busy_.exchange(true, std::memory_order_acquire)) {
      function(context, 0, n);
      return;
    }
    const int64_t grains = (n + grain - 1) / grain;
    const int64_t chunk =
        grain * ((grains + threads * kChunksPerThread - 1) / (threads * kChunksPerThread));
    const int64_t chunks = (n + chunk - 1) / chunk;
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    n_.store(n, std::memory_order_relaxed);
    chunk_.store(chunk, std::memory_order_relaxed);
    unfinished_.store(chunks, std::memory_order_relaxed);
    ++job_;
    claims_.store(job_ << 32 | static_cast<uint64_t>(chunks));
    if (sleepers_.load() > 0) {
      {
        const std::lock_guard<std::mutex> lock(sleeping_);
      }  // a helper that is about to sleep either sees the job or gets the call
      wake_.notify_all();
    }
    work();
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 4096) {
        cpu_relax();
      } else {
        std::this_thread::yield();  // a helper lost its core in the middle of a chunk
      }
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr uint64_t kChunkMask = 0xffffffffu;

  bool has_work() const { return (claims_.load() & kChunkMask) != 0; }
  bool must_exit(int index) const { return index >= threads_.load() - 1; }

  void work() {
    uint64_t claims = claims_.load(std::memory_order_acquire);
    while ((claims & kChunkMask) != 0) {
      const RangeFunction function = function_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      const int64_t n = n_.load(std::memory_order_relaxed);
      const int64_t chunk = chunk_.load(std::memory_order_relaxed);
      if (!claims_.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire))
        continue;
      const int64_t begin = (static_cast<int64_t>(claims & kChunkMask) - 1) * chunk;
      function(context, begin, std::min(n, begin + chunk));
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
      claims = claims_.load(std::memory_order_acquire);
    }
  }

  void help(int index) {
    pthread_setname_np(pthread_self(), "photon-cpu");
    while (!must_exit(index)) {
      work();
      if (spin_until([this] { return has_work(); }, kHelperSpinTime)) continue;
      std::unique_lock<std::mutex> lock(sleeping_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return has_work() || must_exit(index); });
      sleepers_.fetch_sub(1);
    }
  }

  std::atomic<RangeFunction> function_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> n_{0}, chunk_{0};
  uint64_t job_ = 0;  // written by the thread that holds busy_
  alignas(64) std::atomic<uint64_t> claims_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int> threads_{1};
  std::atomic<int> sleepers_{0};
  std::mutex sleeping_, resizing_;
  std::condition_variable wake_;
  std::vector<std::thread> helpers_;
};

std::atomic<Pool*> current_pool{nullptr};
std::mutex creating;

// The pool is never destroyed: helpers may be asleep in it when the process exits. A forked child
// has none of its parent's helpers, and so starts a pool of its own.
void forget_pool() {
  current_pool.store(nullptr);
  new (&creating) std::mutex;
}

Pool& pool() {
  if (Pool* existing = current_pool.load(std::memory_order_acquire)) return *existing;
  const std::lock_guard<std::mutex> lock(creating);
  if (Pool* existing = current_pool.load(std::memory_order_acquire)) return *existing;
  static const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool);
  static_cast<void>(at_fork);
  Pool* created = new Pool(default_threads());
  current_pool.store(created, std::memory_order_release);
  return *created;
}

}  // namespace

int num_threads() { return pool().threads(); }

void set_num_threads(int threads) { pool().resize(std::clamp(threads, 1, kMaxThreads)); }

void parallel_ranges(int64_t n, int64_t grain, RangeFunction function, const void* context) {
  if (n <= 0) return;
  if (n <= grain) {
    function(context, 0, n);
  } else {
    pool().run(n, grain, function, context);
  }
}

}  // namespace photon::cpu
