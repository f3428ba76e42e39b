// Barriers in shared memory, and copies that land when they are awaited: at once, in a random
// order, or when no thread can go on without them. Until then their destination holds NaNs.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr uint64_t kTag = 0xba441e40u;  // what an initialized barrier's upper half holds; its lower
                                        // half is its number in the block

void land(const AsyncCopy& copy) {
  if (copy.global != nullptr) {
    std::memcpy(copy.shared, copy.global, copy.bytes);
  } else {
    std::memset(copy.shared, 0, copy.bytes);
  }
}

std::string missing_arrivals(const void* subject) {
  const MemoryBarrier& barrier = *static_cast<const MemoryBarrier*>(subject);
  return format("phase %u lacks %u of %u arrivals and %lld bytes", barrier.phase, barrier.pending,
                barrier.arrivals, static_cast<long long>(barrier.bytes));
}

MemoryBarrier& find_barrier(Block& block, uint64_t* address, const char* name, Site site) {
  const uint64_t number = *address & 0xffffffffu;
  if (*address >> 32 == kTag && number < block.memory_barrier_count &&
      block.memory_barriers[number].address == address) {
    return block.memory_barriers[number];
  }
  fail(
      format("%s: %s %s finds no initialized barrier there: init_barrier has not run yet, or "
             "something was written over it",
             thread_name(*machine.current).c_str(), name, at(site).c_str()));
}

// The barrier that the block has where the calling thread's has `address`, to count bytes or
// arrivals from outside of the block's threads.
MemoryBarrier& find_fenced(Block& block, uint64_t* address, const char* name, Site site) {
  void* place = &block == &current_block()
                    ? address
                    : place_in(block, address, sizeof(*address), sizeof(*address), name, site);
  MemoryBarrier& barrier = find_barrier(block, static_cast<uint64_t*>(place), name, site);
  if (!barrier.fenced) {
    fail(
        format("%s %s: its barrier was initialized, but fence_barriers() has not been called since",
               name, at(site).c_str()));
  }
  return barrier;
}

void complete_phase_if_due(MemoryBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.waiting = 0;
  make_ready(barrier.waiters);
}

void land_copy(MemoryBarrier& barrier) {
  const size_t which =
                   random_order() ? random_below(static_cast<uint32_t>(barrier.under_way())) : 0,
               copies = barrier.copies.size();
  if (which < copies) {
    land(barrier.copies[which]);
    barrier.bytes -= box_bytes(barrier.copies[which].map);
    barrier.copies.erase(barrier.copies.begin() + static_cast<std::ptrdiff_t>(which));
  } else {
    const SentValues& sent = barrier.sent[which - copies];
    std::memcpy(sent.shared, sent.values, sizeof(sent.values));
    barrier.bytes -= sizeof(sent.values);
    barrier.sent.erase(barrier.sent.begin() + static_cast<std::ptrdiff_t>(which - copies));
  }
  complete_phase_if_due(barrier);
}

void arrive_at(MemoryBarrier& barrier, uint32_t expected_bytes, Site site) {
  if (barrier.pending == 0) {
    fail(format("%s arrives %s at a barrier whose phase %u has had all its %u arrivals",
                thread_name(*machine.current).c_str(), at(site).c_str(), barrier.phase,
                barrier.arrivals));
  }
  --barrier.pending;
  barrier.bytes += expected_bytes;
  complete_phase_if_due(barrier);
  may_switch();
}

// Copies of a box into one block.
void start_copy(Block& block, void* place, const CUtensorMap& map, const int (&begin)[3],
                uint64_t* address, const char* name, Site site) {
  MemoryBarrier& barrier = find_fenced(block, address, name, site);
  std::memset(place, 0xff, box_bytes(map));
  barrier.copies.push_back({place, map, {begin[0], begin[1], begin[2]}});
}

}  // namespace

void check_shared(const void* pointer, size_t bytes, size_t alignment, const char* name,
                  Site site) {
  const Block& block = current_block();
  const auto* first = static_cast<const unsigned char*>(pointer);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    fail(format("%s: %s %s: address %p is not aligned to %zu bytes",
                thread_name(*machine.current).c_str(), name, at(site).c_str(), pointer, alignment));
  }
  const bool dynamic =
      first >= block.shared && first + bytes <= block.shared + machine.launch->shared_bytes;
  if (!dynamic && !in_static_shared(first, bytes)) {
    fail(format("%s: %s %s: %zu bytes at %p are not in the block's shared memory",
                thread_name(*machine.current).c_str(), name, at(site).c_str(), bytes, pointer));
  }
}

void init_barrier(uint64_t* address, uint32_t arrivals, Site site) {
  check_shared(address, sizeof(*address), sizeof(*address), "init_barrier", site);
  if (arrivals == 0) fail(format("init_barrier %s: a barrier of no arrivals", at(site).c_str()));
  Block& block = current_block();
  const uint32_t number = block.memory_barrier_count++;
  if (block.memory_barriers.size() < block.memory_barrier_count)
    block.memory_barriers.emplace_back();
  MemoryBarrier& barrier = block.memory_barriers[number];
  barrier.waiters.assign(machine.warps.size(), 0);
  barrier.copies.clear();
  barrier.sent.clear();
  barrier.address = address;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.bytes = 0;
  barrier.phase = barrier.waiting = 0;
  barrier.fenced = false;
  *address = kTag << 32 | number;
}

void fence_barriers() {
  Block& block = current_block();
  for (uint32_t i = 0; i < block.memory_barrier_count; ++i) block.memory_barriers[i].fenced = true;
}

void arrive(uint64_t* address, uint32_t expected_bytes, Site site) {
  arrive_at(find_barrier(current_block(), address, "arrive", site), expected_bytes, site);
}

void arrive_in_block(uint64_t* address, unsigned rank, Site site) {
  arrive_at(
      find_fenced(reach_block(rank, "arrive_in_block", site), address, "arrive_in_block", site), 0,
      site);
}

void wait_barrier(uint64_t* address, uint32_t parity, Site site) {
  if (parity > 1)
    fail(format("wait_barrier %s: parity is %u, expected 0 or 1", at(site).c_str(), parity));
  Thread& self = *machine.current;
  bool is_hopper =
      random_order() &&
      random_below(2) == 0;  // so that this thread can leave behind others that wait for the same
  while (true) {
    MemoryBarrier& barrier = find_barrier(current_block(), address, "wait_barrier", site);
    while (is_hopper && (barrier.phase & 1u) == parity && barrier.under_way() > 0)
      land_copy(barrier);
    is_hopper = false;
    if ((barrier.phase & 1u) != parity) break;
    barrier.waiters[self.warp->number] |= 1u << self.lane;
    ++barrier.waiting;
    wait_here({"wait_barrier", site, missing_arrivals, &barrier});
  }
  may_switch();
}

void tensor_copy(void* shared, const CUtensorMap* map, const int (&begin)[3], uint64_t* address,
                 Site site) {
  check_tensor_map(map, "tensor_copy", site);
  check_shared(shared, box_bytes(*map), box_alignment(*map), "tensor_copy", site);
  check_box(*map, begin);
  start_copy(current_block(), shared, *map, begin, address, "tensor_copy", site);
  may_switch();
}

void tensor_copy_to(unsigned ranks, void* shared, const CUtensorMap* map, const int (&begin)[3],
                    uint64_t* address, Site site) {
  constexpr const char* kName = "tensor_copy_to";
  check_tensor_map(map, kName, site);
  if (ranks == 0) fail(format("%s %s: it names no block", kName, at(site).c_str()));
  check_box(*map, begin);
  for (unsigned rank = 0; ranks >> rank != 0; ++rank) {
    if ((ranks >> rank & 1u) == 0) continue;
    Block& block = reach_block(rank, kName, site);
    start_copy(block, place_in(block, shared, box_bytes(*map), box_alignment(*map), kName, site),
               *map, begin, address, kName, site);
  }
  may_switch();
}

void send_to_block(float* pointer, unsigned rank, const float (&values)[2], uint64_t* address,
                   Site site) {
  constexpr const char* kName = "send_to_block";
  Block& block = reach_block(rank, kName, site);
  void* place = place_in(block, pointer, sizeof(values), sizeof(values), kName, site);
  MemoryBarrier& barrier = find_fenced(block, address, kName, site);
  std::memset(place, 0xff, sizeof(values));
  barrier.sent.push_back({place, {values[0], values[1]}});
  may_switch();
}

bool land_awaited_copy() {
  for (Block& block : machine.blocks) {
    const uint32_t count = block.memory_barrier_count,
                   first = random_order() && count > 0 ? random_below(count) : 0;
    for (uint32_t i = 0; i < count; ++i) {
      MemoryBarrier& barrier = block.memory_barriers[(first + i) % count];
      if (barrier.waiting == 0 || barrier.under_way() == 0) continue;
      land_copy(barrier);
      return true;
    }
  }
  return false;
}

std::string leftovers(const Block& block) {
  for (uint32_t i = 0; i < block.memory_barrier_count; ++i) {
    if (block.memory_barriers[i].under_way() > 0)
      return "copies into its shared memory were still under way: nobody waited for them";
  }
  return "";
}

void async_copy(void* shared, const void* global, size_t bytes, bool valid, Site site) {
  const std::string name = format("async_copy%zu", bytes);
  check_shared(shared, bytes, bytes, name.c_str(), site);
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    fail(format("%s: %s %s from %p, which is not aligned to %zu bytes",
                thread_name(*machine.current).c_str(), name.c_str(), at(site).c_str(), global,
                bytes));
  }
  if (valid) check_read(global, bytes);
  std::memset(shared, 0xff, bytes);
  machine.current->copies.push_back({shared, valid ? global : nullptr, bytes});
}

void commit_copies() {
  Thread& self = *machine.current;
  uint32_t grouped = 0;
  for (const uint32_t size : self.group_sizes) grouped += size;
  self.group_sizes.push_back(static_cast<uint32_t>(self.copies.size()) - grouped);
  may_switch();
}

void wait_copies(unsigned pending) {
  Thread& self = *machine.current;
  if (self.group_sizes.size() <= pending) return may_switch();
  const auto groups = static_cast<std::ptrdiff_t>(self.group_sizes.size() - pending);
  std::ptrdiff_t landed = 0;
  for (std::ptrdiff_t i = 0; i < groups; ++i) landed += self.group_sizes[static_cast<size_t>(i)];
  for (std::ptrdiff_t i = 0; i < landed; ++i) land(self.copies[static_cast<size_t>(i)]);
  self.copies.erase(self.copies.begin(), self.copies.begin() + landed);
  self.group_sizes.erase(self.group_sizes.begin(), self.group_sizes.begin() + groups);
  may_switch();
}

}  // namespace emulator
