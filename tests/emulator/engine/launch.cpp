// A launch: the blocks of each cluster get their memory and threads, and run until all have ended.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "machine.h"

// The section that __shared__ variables are put into; absent where no kernel has any.
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_photon_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_photon_shared[];

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Machine machine;

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every floating type
constexpr size_t kGuardBytes = 1024;     // on both sides of a block's dynamic shared memory
constexpr size_t kSharedAlignment = 1024;

// --- static shared memory ------------------------------------------------------------------------

struct Range {
  unsigned char *first, *last;

  size_t bytes() const { return static_cast<size_t>(last - first); }
};

const Range kStaticShared = {__start_photon_shared, __stop_photon_shared};

// The __shared__ variables of all kernels lie in one section. Which of them a kernel uses is seen
// from its first few launches, so that later only those are poisoned before each of its blocks.
struct StaticShared {
  std::vector<Range> ranges;
  int looks = 0;
};

constexpr int kLooks = 4;

void poison(StaticShared& used) {
  if (kStaticShared.bytes() == 0) return;
  if (used.looks < kLooks) {
    std::memset(kStaticShared.first, kPoison, kStaticShared.bytes());
    return;
  }
  for (const Range& range : used.ranges) std::memset(range.first, kPoison, range.bytes());
}

void look(StaticShared& used) {
  if (used.looks >= kLooks || kStaticShared.bytes() == 0) return;
  ++used.looks;
  constexpr std::ptrdiff_t kStep = 64;
  static const std::vector<unsigned char> untouched(kStep, kPoison);
  for (unsigned char* at = kStaticShared.first; at < kStaticShared.last; at += kStep) {
    unsigned char* end = std::min(at + kStep, kStaticShared.last);
    if (std::memcmp(at, untouched.data(), static_cast<size_t>(end - at)) == 0) continue;
    if (!used.ranges.empty() && used.ranges.back().last == at) {
      used.ranges.back().last = end;
    } else {
      used.ranges.push_back({at, end});
    }
  }
}

// --- dynamic shared memory -----------------------------------------------------------------------

struct Free {
  void operator()(unsigned char* memory) const { std::free(memory); }
};

// One block's, with guards on both sides.
unsigned char* arena(size_t block, size_t bytes) {
  static std::vector<std::pair<std::unique_ptr<unsigned char, Free>, size_t>> arenas;
  if (arenas.size() <= block) arenas.resize(block + 1);
  auto& [memory, size] = arenas[block];
  const size_t needed =
      (bytes + 2 * kGuardBytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  if (size < needed) {
    memory.reset(static_cast<unsigned char*>(std::aligned_alloc(kSharedAlignment, needed)));
    size = needed;
  }
  std::memset(memory.get(), kPoison, bytes + 2 * kGuardBytes);
  return memory.get() + kGuardBytes;
}

bool is_guard_whole(const unsigned char* first) {
  return std::all_of(first, first + kGuardBytes,
                     [](unsigned char byte) { return byte == kPoison; });
}

// --- one cluster ---------------------------------------------------------------------------------

void thread_main() {
  fiber_started();
  machine.launch->run(machine.launch->args);
  end_thread();
}

// Called when the shape of the machine changes, which is rarer than launches.
void shape_machine(unsigned blocks, unsigned threads) {
  const unsigned warps = (threads + kWarpSize - 1) / kWarpSize;
  if (machine.blocks.size() == blocks && machine.blocks[0].threads == static_cast<int>(threads))
    return;
  machine.blocks.clear();
  machine.blocks.resize(blocks);
  machine.warps.clear();
  machine.warps.resize(size_t{blocks} * warps);
  machine.threads.clear();
  machine.threads.resize(size_t{blocks} * threads);
  for (unsigned b = 0; b < blocks; ++b) {
    machine.blocks[b].rank = b;
    machine.blocks[b].first_warp = b * warps;
    machine.blocks[b].threads = static_cast<int>(threads);
    for (unsigned w = 0; w < warps; ++w) {
      Warp& warp = machine.warps[b * warps + w];
      const unsigned lanes = std::min(threads - w * kWarpSize, kWarpSize);
      warp.block = &machine.blocks[b];
      warp.threads = &machine.threads[size_t{b} * threads + w * kWarpSize];
      warp.number = b * warps + w;
      warp.lanes = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
      for (unsigned lane = 0; lane < lanes; ++lane) {
        warp.threads[lane].warp = &warp;
        warp.threads[lane].lane = lane;
      }
    }
  }
}

void prepare_threads(const Extent& size) {
  for (size_t i = 0; i < machine.threads.size(); ++i) {
    Thread& thread = machine.threads[i];
    const auto number = static_cast<unsigned>(i % static_cast<size_t>(machine.blocks[0].threads));
    thread.index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
    thread.ended = false;
    thread.waited = !machine.launch->pdl;
    thread.wait.name = thread.entry.name = nullptr;
    thread.copies.clear();
    thread.group_sizes.clear();
    prepare_fiber(thread.fiber, i, thread_main);
  }
  for (Warp& warp : machine.warps) {
    warp.ready = warp.ended = warp.collective_count = 0;
  }
  machine.live = static_cast<int>(machine.threads.size());
}

void prepare_blocks(const Launch& launch, uint64_t first_block) {
  for (size_t i = 0; i < machine.blocks.size(); ++i) {
    Block& block = machine.blocks[i];
    const uint64_t number = first_block + i;
    block.index = {static_cast<unsigned>(number % launch.grid.x),
                   static_cast<unsigned>(number / launch.grid.x % launch.grid.y),
                   static_cast<unsigned>(number / launch.grid.x / launch.grid.y)};
    block.live = block.threads;
    block.memory_barrier_count = 0;
    block.shared = arena(i, launch.shared_bytes);
    for (int number = 0; number < kBlockBarriers; ++number)
      clear_barrier(block.barriers[number], number);
  }
  clear_cluster_barrier();
}

void note_failure(const std::string& message) {
  if (machine.failed) return;
  machine.failed = true;
  machine.error = message;
}

void check_blocks(const Launch& launch) {
  for (const Block& block : machine.blocks) {
    const std::string left = leftovers(block);
    if (!left.empty()) note_failure(format("block %u has ended, but ", block.index.x) + left);
    const bool whole = is_guard_whole(block.shared - kGuardBytes) &&
                       is_guard_whole(block.shared + launch.shared_bytes);
    if (!whole)
      note_failure(format("block %u wrote outside its %zu bytes of dynamic shared memory",
                          block.index.x, launch.shared_bytes));
  }
}

}  // namespace

bool in_static_shared(const unsigned char* first, size_t bytes) {
  return first >= kStaticShared.first && first + bytes <= kStaticShared.last;
}

unsigned char* dynamic_shared() { return current_block().shared; }

bool run_grid(const Launch& launch, std::string& error) {
  static std::mutex one_at_a_time;
  static std::unordered_map<const void*, StaticShared> static_shared;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z,
                 clusters = blocks / launch.cluster;
  StaticShared& used = static_shared[launch.kernel];
  machine.launch = &launch;
  machine.failed = machine.lets_next_start = machine.lets_next_start_unawaited = false;
  blockDim = dim3(launch.block.x, launch.block.y, launch.block.z);
  gridDim = dim3(launch.grid.x, launch.grid.y, launch.grid.z);
  shape_machine(launch.cluster, launch.block.x * launch.block.y * launch.block.z);
  begin_order(clusters);
  begin_accesses();
  for (uint64_t i = 0; i < clusters && !machine.failed; ++i) {
    prepare_blocks(launch, ordered_cluster(i) * launch.cluster);
    prepare_threads(launch.block);
    begin_cluster_order();
    poison(used);
    run_cluster();
    if (i == 0 || i + 1 == clusters) look(used);
    if (!machine.failed) check_blocks(launch);
  }
  end_accesses();
  if (!machine.failed) return true;
  error = format("the emulated kernel %s failed, in a grid of %llu blocks of %u threads: ",
                 launch.signature, static_cast<unsigned long long>(blocks),
                 launch.block.x * launch.block.y * launch.block.z) +
          machine.error;
  return false;
}

}  // namespace emulator
