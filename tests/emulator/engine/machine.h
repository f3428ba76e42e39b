// What the engine holds while a grid runs: the blocks of one cluster, their warps and threads. One
// launch runs at a time, on the host thread that made it; clusters run one after another.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cuda.h"
#include "emulator/engine.h"
#include "emulator/keywords.h"
#include "fiber.h"

namespace emulator {

constexpr unsigned kWarpSize = 32;
constexpr int kBlockBarriers = 16;

struct Block;

struct AsyncCopy {
  void* shared;
  const void* global;  // null: zeros
  size_t bytes;
};

struct TensorCopy {
  void* shared;
  CUtensorMap map;
  int begin[3];  // column, row, block
};

// Two values from another block.
struct SentValues {
  void* shared;
  float values[2];
};

// What a thread that is not ready waits at; null name: it is ready or has ended.
struct Wait {
  const char* name;
  Site site;
  std::string (*describe)(const void* subject);  // what is missing, for a deadlock's message
  const void* subject;
};

// Where a thread entered the cluster's barrier that it has not met at yet; null name: nowhere.
struct Entry {
  const char* name;
  Site site;
  uint32_t phase;
};

struct Warp;

struct Thread {
  Fiber fiber;
  Extent index;
  Warp* warp;
  unsigned lane;
  bool ended;
  bool waited;  // for the kernels before, as a thread of a launch without pdl has by itself
  Wait wait;
  Entry entry;
  std::vector<AsyncCopy> copies;      // of async_copy(), oldest first
  std::vector<uint32_t> group_sizes;  // of the committed groups that have not landed
};

// A warp intrinsic that some of its lanes have reached.
struct Collective {
  const char* name;
  unsigned mask, arrived;
  Complete complete;
  Site site;
  void* payloads[kWarpSize];
};

struct Warp {
  Block* block;
  Thread* threads;
  unsigned number;  // in the cluster
  unsigned slot;    // its place in the order of choice
  unsigned lanes;   // bits of those that exist
  unsigned ready, ended;
  unsigned collective_count;
  Collective collectives[kWarpSize];  // of different masks
};

// Threads that wait for a barrier, as bits of lanes by warp of the cluster.
using Waiters = std::vector<uint32_t>;

struct BlockBarrier {
  int number, expected, arrived;
  Waiters waiters;
};

struct ClusterBarrier {
  int arrived;
  uint32_t phase;  // how many are complete
  Waiters waiters;
};

struct MemoryBarrier {
  uint64_t* address;
  uint32_t arrivals, pending;
  int64_t
      bytes;  // announced and not landed; negative where more have landed than were announced yet
  uint32_t phase;  // how many are complete
  bool fenced;
  unsigned waiting;
  Waiters waiters;
  std::vector<TensorCopy> copies;  // on their way
  std::vector<SentValues> sent;    // the same

  size_t under_way() const { return copies.size() + sent.size(); }
};

struct Block {
  Extent index;
  unsigned rank;
  unsigned char* shared;
  unsigned first_warp, warps;
  int threads, live;
  BlockBarrier barriers[kBlockBarriers];
  std::deque<MemoryBarrier> memory_barriers;  // the first memory_barrier_count are in use
  uint32_t memory_barrier_count;
};

struct Machine {
  const Launch* launch = nullptr;
  Fiber host;
  Thread* current = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  int live = 0;
  bool lets_next_start = false;            // some thread did
  bool lets_next_start_unawaited = false;  // some did before it had waited
  bool failed = false;
  std::string error;
  ClusterBarrier cluster_barrier;
};

extern Machine machine;

// --- order: who goes on (order.cpp) --------------------------------------------------------------

void begin_order(uint64_t blocks);            // of a launch
uint64_t ordered_cluster(uint64_t position);  // which cluster runs at this position
void begin_cluster_order();
bool random_order();
uint32_t random_below(uint32_t bound);
void make_ready(Warp& warp, unsigned lanes);
void make_ready(Waiters& waiters);  // and clears them

// The calling thread made others ready, itself perhaps among them: in a random order somebody else
// may go on first.
void give_way();
[[noreturn]] void end_thread();
void run_cluster();

// Takes who goes on next out of the ready ones; where nobody can, copies land, or the launch fails.
Thread* choose();

// Continues `thread` in the place of the fiber that calls, until somebody continues that.
inline void continue_with(Fiber& from, Thread& thread, bool for_good = false) {
  const Extent &index = thread.index, &block = thread.warp->block->index;
  machine.current = &thread;
  threadIdx = {index.x, index.y, index.z};
  blockIdx = {block.x, block.y, block.z};
  switch_fiber(from, thread.fiber, for_good);
}

// The calling thread waits until somebody makes it ready. Inline, because a return behind a switch
// is never predicted.
inline void wait_here(const Wait& wait) {
  Thread& self = *machine.current;
  self.wait = wait;
  Thread* next = choose();
  if (next != &self) continue_with(self.fiber, *next);
  self.wait.name = nullptr;
}

// --- global memory (memory.cpp) ------------------------------------------------------------------

void begin_accesses();  // of a launch
void end_accesses();
// Ends the launch if the calling thread may not read there yet.
void check_read(const void* pointer, size_t bytes);

// --- the rest ------------------------------------------------------------------------------------

void clear_barrier(BlockBarrier& barrier, int number);
void clear_cluster_barrier();
void check_thread_end(Thread& thread);
bool land_awaited_copy();  // lets a copy arrive that somebody waits for; false if there is none
std::string leftovers(
    const Block& block);  // what a block that has ended should not have left; empty: nothing
std::string deadlock_message();
// Ends the launch unless these bytes lie in the block's shared memory, aligned.
void check_shared(const void* pointer, size_t bytes, size_t alignment, const char* name, Site site);
// Block `rank` of the cluster, into whose shared memory the calling thread is about to reach. Ends
// the launch where that block may not have started, or has ended.
Block& reach_block(unsigned rank, const char* name, Site site);
// What that block has in its dynamic shared memory where the calling thread's block has these
// bytes.
void* place_in(const Block& block, const void* pointer, size_t bytes, size_t alignment,
               const char* name, Site site);
bool in_static_shared(const unsigned char* first, size_t bytes);
uint32_t box_bytes(const CUtensorMap& map);
size_t box_alignment(const CUtensorMap& map);  // of its place in shared memory
void land(const TensorCopy& copy);
void check_box(const CUtensorMap& map, const int (&begin)[3]);  // check_read() of all of it
std::string at(const Site& site);
std::string thread_name(const Thread& thread);
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

inline Block& current_block() { return *machine.current->warp->block; }

}  // namespace emulator
