// In which order threads, warps and clusters go on. Seed 0: round robin, a warp at a time. Any
// other seed: random clusters, and in each cluster one of two ways, drawn anew: a random thread at
// every switch, or warps with random priorities, so that one warp runs as far ahead of another as
// the barriers let it.
#include <cstdlib>
#include <numeric>

#include "machine.h"

namespace emulator {
namespace {

uint64_t seed_from_environment() {
  const char* text = std::getenv("PHOTON_EMULATOR_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 0);
}

struct Order {
  uint64_t seed = seed_from_environment(), state = 0;
  bool by_priority = false;
  unsigned last_slot = 0, last_lane = 0;
  std::vector<uint64_t> ready_slots;  // bits
  std::vector<Warp*> warp_of_slot;
  std::vector<uint64_t> clusters;  // empty: as they are numbered
};

Order order;

uint64_t next_random() {  // splitmix64
  uint64_t z = order.state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

template <typename T>
void shuffle(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[next_random() % i]);
}

// The first ready slot at or after `from`, around the end; -1: nobody is ready.
int ready_slot(unsigned from) {
  const size_t words = order.ready_slots.size();
  size_t word = from / 64;
  uint64_t bits = order.ready_slots[word] & ~uint64_t{0} << from % 64;
  for (size_t others = 0; bits == 0; ++others) {
    if (others == words) return -1;
    word = word + 1 == words ? 0 : word + 1;
    bits = order.ready_slots[word];
  }
  return static_cast<int>(word * 64 + __builtin_ctzll(bits));
}

unsigned lane_from(unsigned lanes, unsigned from) {
  const unsigned later = from < kWarpSize ? lanes & (~0u << from) : 0;
  return __builtin_ctz(later != 0 ? later : lanes);
}

// Takes the thread that goes on out of the ready ones; null: there is none.
Thread* take_next() {
  unsigned slot = order.last_slot, lane = order.last_lane + 1;
  if (order.seed != 0) {
    slot = order.by_priority ? 0 : random_below(static_cast<uint32_t>(order.warp_of_slot.size()));
    lane = random_below(kWarpSize);
  }
  if (order.seed != 0 || order.warp_of_slot[slot]->ready == 0) {
    const int found = ready_slot(slot);
    if (found < 0) return nullptr;
    slot = static_cast<unsigned>(found);
  }
  Warp& warp = *order.warp_of_slot[slot];
  lane = lane_from(warp.ready, lane);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) order.ready_slots[slot / 64] &= ~(uint64_t{1} << slot % 64);
  order.last_slot = slot;
  order.last_lane = lane;
  return warp.threads + lane;
}

}  // namespace

bool random_order() { return order.seed != 0; }

uint32_t random_below(uint32_t bound) {
  return static_cast<uint32_t>((next_random() >> 32) * bound >> 32);
}

void begin_order(uint64_t clusters) {
  order.state = order.seed;
  order.clusters.clear();
  if (order.seed == 0) return;
  order.clusters.resize(clusters);
  std::iota(order.clusters.begin(), order.clusters.end(), uint64_t{0});
  shuffle(order.clusters);
}

uint64_t ordered_cluster(uint64_t position) {
  return order.clusters.empty() ? position : order.clusters[position];
}

void begin_cluster_order() {
  const size_t warps = machine.warps.size();
  order.warp_of_slot.resize(warps);
  for (size_t i = 0; i < warps; ++i) order.warp_of_slot[i] = &machine.warps[i];
  if (order.seed != 0) {
    shuffle(order.warp_of_slot);
    order.by_priority = random_below(2) == 0;
  }
  order.ready_slots.assign((warps + 63) / 64, 0);
  for (size_t i = 0; i < warps; ++i) order.warp_of_slot[i]->slot = static_cast<unsigned>(i);
  order.last_slot = 0;
  order.last_lane = kWarpSize - 1;
  for (Warp& warp : machine.warps) make_ready(warp, warp.lanes);
}

void make_ready(Warp& warp, unsigned lanes) {
  warp.ready |= lanes;
  order.ready_slots[warp.slot / 64] |= uint64_t{1} << warp.slot % 64;
}

void make_ready(Waiters& waiters) {
  for (size_t i = 0; i < waiters.size(); ++i) {
    if (waiters[i] != 0) make_ready(machine.warps[i], waiters[i]);
    waiters[i] = 0;
  }
}

Thread* choose() {
  Thread* next = take_next();
  while (next == nullptr) {
    if (!land_awaited_copy()) fail(deadlock_message());
    next = take_next();
  }
  return next;
}

void give_way() {
  if (!random_order()) return;
  Thread& self = *machine.current;
  make_ready(*self.warp, 1u << self.lane);
  Thread* next = take_next();
  if (next != &self) continue_with(self.fiber, *next);
}

void may_switch() {
  if (random_order() && random_below(2) == 0) give_way();
}

void end_thread() {
  Thread& self = *machine.current;
  check_thread_end(self);
  if (!self.waited) {
    fail(
        format("%s has ended without having called wait_for_earlier(), and the launch was one that "
               "may start early",
               thread_name(self).c_str()));
  }
  self.ended = true;
  self.warp->ended |= 1u << self.lane;
  --self.warp->block->live;
  if (--machine.live > 0) continue_with(self.fiber, *choose(), true);
  switch_fiber(self.fiber, machine.host, true);
  __builtin_unreachable();
}

void run_cluster() { continue_with(machine.host, *take_next()); }

void fail(const std::string& message) {
  machine.failed = true;
  machine.error = message;
  switch_fiber(machine.current->fiber, machine.host, true);
  __builtin_unreachable();
}

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) void photon_emulator_set_seed(uint64_t seed) {
  emulator::order.seed = seed;
}
