// Barriers of a block and of a cluster.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

std::string missing_threads(const void* subject) {
  const BlockBarrier& barrier = *static_cast<const BlockBarrier*>(subject);
  return format("barrier %d, where %d of %d have come", barrier.number, barrier.arrived,
                barrier.expected);
}

std::string missing_in_cluster(const void*) {
  return format("the cluster's barrier, where %d of %zu have come", machine.cluster_barrier.arrived,
                machine.threads.size());
}

// The instructions are `aligned`: a warp executes each as one.
void check_aligned(const char* name, Site site, Site other) {
  if (other.line == site.line && other.file == site.file) return;
  fail(format("lanes of one warp disagree: %s is in %s %s, others %s",
              thread_name(*machine.current).c_str(), name, at(site).c_str(), at(other).c_str()));
}

void check_waiters(const Waiters& waiters, const char* name, Site site) {
  const Warp& warp = *machine.current->warp;
  const uint32_t mates = waiters[warp.number];
  if (mates != 0) check_aligned(name, site, warp.threads[__builtin_ctz(mates)].wait.site);
}

void arrive_and_wait(BlockBarrier& barrier, int expected, const char* name, Site site) {
  Thread& self = *machine.current;
  if (barrier.arrived == 0) {
    barrier.expected = expected;
  } else if (barrier.expected != expected) {
    fail(format("%s brings %d threads to %s %s, but others wait there for %d",
                thread_name(self).c_str(), expected, name, at(site).c_str(), barrier.expected));
  }
  check_waiters(barrier.waiters, name, site);
  if (++barrier.arrived < expected) {
    barrier.waiters[self.warp->number] |= 1u << self.lane;
    return wait_here({name, site, missing_threads, &barrier});
  }
  barrier.arrived = 0;
  make_ready(barrier.waiters);
  give_way();
}

// The thread that is in this phase of the cluster's barrier, of those given; null: none is.
const Thread* find_entered(const Thread* threads, size_t count) {
  const auto has_entered = [](const Thread& one) {
    return one.entry.name != nullptr && one.entry.phase == machine.cluster_barrier.phase;
  };
  const Thread* found = std::find_if(threads, threads + count, has_entered);
  return found == threads + count ? nullptr : found;
}

void enter(const char* name, Site site) {
  Thread& self = *machine.current;
  ClusterBarrier& barrier = machine.cluster_barrier;
  const int threads = static_cast<int>(machine.threads.size());
  if (self.entry.name != nullptr) {
    fail(format("%s calls %s %s, but it has called %s %s and not meet_cluster() since",
                thread_name(self).c_str(), name, at(site).c_str(), self.entry.name,
                at(self.entry.site).c_str()));
  }
  if (machine.live < threads) {
    fail(
        format("%s reaches %s %s, which waits for all %d threads of the cluster, but %d have ended",
               thread_name(self).c_str(), name, at(site).c_str(), threads, threads - machine.live));
  }
  const Thread* mate =
      find_entered(self.warp->threads, static_cast<size_t>(__builtin_popcount(self.warp->lanes)));
  if (mate != nullptr) check_aligned(name, site, mate->entry.site);
  self.entry = {name, site, barrier.phase};
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.phase;
  make_ready(barrier.waiters);
}

void meet(const char* name, Site site) {
  Thread& self = *machine.current;
  ClusterBarrier& barrier = machine.cluster_barrier;
  if (self.entry.name == nullptr) {
    fail(format("%s calls %s %s, but it has not called enter_cluster() or leave_cluster() before",
                thread_name(self).c_str(), name, at(site).c_str()));
  }
  if (self.entry.phase == barrier.phase) {
    check_waiters(barrier.waiters, name, site);
    barrier.waiters[self.warp->number] |= 1u << self.lane;
    wait_here({name, site, missing_in_cluster, nullptr});
  } else {
    give_way();
  }
  self.entry.name = nullptr;
}

}  // namespace

void clear_barrier(BlockBarrier& barrier, int number) {
  barrier.number = number;
  barrier.arrived = 0;
  barrier.waiters.assign(machine.warps.size(), 0);
}

void clear_cluster_barrier() {
  machine.cluster_barrier.arrived = 0;
  machine.cluster_barrier.phase = 0;
  machine.cluster_barrier.waiters.assign(machine.warps.size(), 0);
}

void sync_block(const char* name, int number, int threads, Site site) {
  Block& block = current_block();
  if (number < 0 || number >= kBlockBarriers)
    fail(format("%s %s: there is no barrier %d, only 0 to 15", name, at(site).c_str(), number));
  if (threads == kWholeBlock || threads == block.threads) {
    threads = block.threads;
    if (block.live < threads) {
      fail(
          format("%s reaches %s %s, which waits for all %d threads of the block, but %d have ended",
                 thread_name(*machine.current).c_str(), name, at(site).c_str(), threads,
                 threads - block.live));
    }
  } else if (threads <= 0 || threads > block.threads ||
             threads % static_cast<int>(kWarpSize) != 0) {
    fail(format("%s %s: %d threads, expected a multiple of 32 up to the block's %d", name,
                at(site).c_str(), threads, block.threads));
  }
  arrive_and_wait(block.barriers[number], threads, name, site);
}

void sync_cluster(Site site) {
  enter("sync_cluster", site);
  meet("sync_cluster", site);
}

void enter_cluster(const char* name, Site site) {
  enter(name, site);
  may_switch();
}

void meet_cluster(Site site) { meet("meet_cluster", site); }

void check_thread_end(Thread& thread) {
  const auto refuse = [&](const char* name, const Site& site, const char* waits) {
    fail(format("%s has ended, but %s %s waits for %s", thread_name(thread).c_str(), name,
                at(site).c_str(), waits));
  };
  for (unsigned i = 0; i < thread.warp->collective_count; ++i) {
    const Collective& one = thread.warp->collectives[i];
    if ((one.mask >> thread.lane & 1u) != 0) refuse(one.name, one.site, "its lane");
  }
  const Block& block = *thread.warp->block;
  const auto site_of = [](const BlockBarrier& barrier) {
    for (size_t i = 0; i < barrier.waiters.size(); ++i) {
      if (barrier.waiters[i] != 0)
        return machine.warps[i].threads[__builtin_ctz(barrier.waiters[i])].wait.site;
    }
    return Site{"", 0};
  };
  for (const BlockBarrier& barrier : block.barriers) {
    if (barrier.arrived > 0 && barrier.expected == block.threads)
      refuse("a barrier", site_of(barrier), "every thread of the block");
  }
  if (thread.entry.name != nullptr)
    refuse(thread.entry.name, thread.entry.site, "its meet_cluster()");
  const Thread* entered = machine.cluster_barrier.arrived > 0
                              ? find_entered(machine.threads.data(), machine.threads.size())
                              : nullptr;
  if (entered != nullptr)
    refuse(entered->entry.name, entered->entry.site, "every thread of the cluster");
}

unsigned cluster_rank() { return current_block().rank; }

Block& reach_block(unsigned rank, const char* name, Site site) {
  const Thread& self = *machine.current;
  if (rank >= machine.blocks.size()) {
    fail(format("%s %s: rank is %u, but the cluster has %zu blocks", name, at(site).c_str(), rank,
                machine.blocks.size()));
  }
  Block& block = machine.blocks[rank];
  if (&block == &current_block()) return block;
  const auto refuse = [&](const char* why) {
    fail(format("%s reaches into the shared memory of block %u of its cluster by %s %s, %s",
                thread_name(self).c_str(), rank, name, at(site).c_str(), why));
  };
  if (machine.cluster_barrier.phase == 0)
    refuse("before which the cluster has had no barrier: the block may not have started");
  if (self.entry.name != nullptr && self.entry.phase == 0)
    refuse("before its first meet_cluster(): the block may not have started");
  if (block.live == 0)
    refuse("but the block has ended: only a cluster barrier before its end keeps a block's memory");
  return block;
}

void* place_in(const Block& block, const void* pointer, size_t bytes, size_t alignment,
               const char* name, Site site) {
  check_shared(pointer, bytes, alignment, name, site);
  const auto* first = static_cast<const unsigned char*>(pointer);
  if (in_static_shared(first, bytes)) {
    fail(
        format("%s %s: the blocks of a cluster share one copy of static shared memory here, and "
               "cannot reach another's",
               name, at(site).c_str()));
  }
  return block.shared + (first - current_block().shared);
}

namespace {

// The same place in a block of which every thread is there yet.
void* place_in_live_block(const void* pointer, unsigned rank, size_t bytes, const char* name,
                          Site site) {
  const Block& target = reach_block(rank, name, site);
  if (target.live < target.threads) {
    fail(
        format("%s reaches into the shared memory of block %u of its cluster by %s %s, where "
               "threads have ended: only a cluster barrier "
               "before its end keeps a block's memory",
               thread_name(*machine.current).c_str(), rank, name, at(site).c_str()));
  }
  return place_in(target, pointer, bytes, bytes, name, site);
}

}  // namespace

void store_in_block(void* pointer, unsigned rank, const void* value, size_t bytes, Site site) {
  std::memcpy(place_in_live_block(pointer, rank, bytes, "store_in_block", site), value, bytes);
}

void load_from_block(void* value, const void* pointer, unsigned rank, size_t bytes, Site site) {
  std::memcpy(value, place_in_live_block(pointer, rank, bytes, "load_from_block", site), bytes);
  may_switch();
}

}  // namespace emulator
