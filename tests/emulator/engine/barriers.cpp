// Barriers of a block and of a cluster.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

std::string missing_threads(const void* subject) {
  const BlockBarrier& barrier = *static_cast<const BlockBarrier*>(subject);
  return format("barrier %d, where %d of %d have come", barrier.number, barrier.arrived, barrier.expected);
}

void arrive_and_wait(BlockBarrier& barrier, int expected, const char* name, Site site) {
  Thread& self = *machine.current;
  Warp& warp = *self.warp;
  if (barrier.arrived == 0) {
    barrier.expected = expected;
  } else if (barrier.expected != expected) {
    fail(format("%s brings %d threads to %s %s, but others wait there for %d", thread_name(self).c_str(), expected, name, at(site).c_str(),
                barrier.expected));
  }
  const uint32_t mates = barrier.waiters[warp.number];
  if (mates != 0) {  // the instruction is `aligned`: a warp executes it as one
    const Site& other = warp.threads[__builtin_ctz(mates)].wait.site;
    if (other.line != site.line || other.file != site.file) {
      fail(format("lanes of one warp disagree: %s is in %s %s, others %s", thread_name(self).c_str(), name, at(site).c_str(),
                  at(other).c_str()));
    }
  }
  if (++barrier.arrived < expected) {
    barrier.waiters[warp.number] |= 1u << self.lane;
    return wait_here({name, site, missing_threads, &barrier});
  }
  barrier.arrived = 0;
  make_ready(barrier.waiters);
  give_way();
}

}  // namespace

void clear_barrier(BlockBarrier& barrier, int number) {
  barrier.number = number;
  barrier.arrived = 0;
  barrier.waiters.assign(machine.warps.size(), 0);
}

void sync_block(const char* name, int number, int threads, Site site) {
  Block& block = current_block();
  if (number < 0 || number >= kBlockBarriers) fail(format("%s %s: there is no barrier %d, only 0 to 15", name, at(site).c_str(), number));
  if (threads == kWholeBlock || threads == block.threads) {
    threads = block.threads;
    if (block.live < threads) {
      fail(format("%s reaches %s %s, which waits for all %d threads of the block, but %d have ended", thread_name(*machine.current).c_str(),
                  name, at(site).c_str(), threads, threads - block.live));
    }
  } else if (threads <= 0 || threads > block.threads || threads % static_cast<int>(kWarpSize) != 0) {
    fail(format("%s %s: %d threads, expected a multiple of 32 up to the block's %d", name, at(site).c_str(), threads, block.threads));
  }
  arrive_and_wait(block.barriers[number], threads, name, site);
}

void sync_cluster(Site site) {
  const int threads = static_cast<int>(machine.threads.size());
  if (machine.live < threads) {
    fail(format("%s reaches sync_cluster %s, which waits for all %d threads of the cluster, but %d have ended",
                thread_name(*machine.current).c_str(), at(site).c_str(), threads, threads - machine.live));
  }
  arrive_and_wait(machine.cluster_barrier, threads, "sync_cluster", site);
}

void check_thread_end(Thread& thread) {
  const auto refuse = [&](const char* name, const Site& site, const char* waits) {
    fail(format("%s has ended, but %s %s waits for %s", thread_name(thread).c_str(), name, at(site).c_str(), waits));
  };
  for (unsigned i = 0; i < thread.warp->collective_count; ++i) {
    const Collective& one = thread.warp->collectives[i];
    if ((one.mask >> thread.lane & 1u) != 0) refuse(one.name, one.site, "its lane");
  }
  const Block& block = *thread.warp->block;
  const auto site_of = [](const BlockBarrier& barrier) {
    for (size_t i = 0; i < barrier.waiters.size(); ++i) {
      if (barrier.waiters[i] != 0) return machine.warps[i].threads[__builtin_ctz(barrier.waiters[i])].wait.site;
    }
    return Site{"", 0};
  };
  for (const BlockBarrier& barrier : block.barriers) {
    if (barrier.arrived > 0 && barrier.expected == block.threads) refuse("a barrier", site_of(barrier), "every thread of the block");
  }
  if (machine.cluster_barrier.arrived > 0) refuse("sync_cluster", site_of(machine.cluster_barrier), "every thread of the cluster");
}

unsigned cluster_rank() { return current_block().rank; }

void store_in_block(void* pointer, unsigned rank, const void* value, size_t bytes, Site site) {
  check_shared(pointer, bytes, bytes, "store_in_block", site);
  if (rank >= machine.blocks.size()) {
    fail(format("store_in_block %s: rank is %u, but the cluster has %zu blocks", at(site).c_str(), rank, machine.blocks.size()));
  }
  Block& target = machine.blocks[rank];
  if (target.live < target.threads) {
    fail(
        format("%s writes to the shared memory of block %u of its cluster %s, where threads have ended: only a cluster barrier before its "
               "end keeps "
               "a block's memory",
               thread_name(*machine.current).c_str(), rank, at(site).c_str()));
  }
  std::memcpy(target.shared + (static_cast<unsigned char*>(pointer) - current_block().shared), value, bytes);
}

}  // namespace emulator
