// What kernels read and write in global memory, as far as programmatic launches are concerned: a
// kernel that has started early may not touch what a kernel that may still run writes, before each
// of its threads has waited.
//
// The compiler reports every access of a kernel: kernels are compiled with -fsanitize=thread, whose
// calls end here instead of in its library. Launches run one after another all the same; what
// counts is which of them could have overlapped on a GPU.
#include <cstring>
#include <memory>
#include <unordered_map>

#include "machine.h"

namespace emulator {
namespace {

constexpr uintptr_t kPageBytes = 4096;

// Of each byte of a page the kernel that wrote it last (1 + its index in Written::kernels), and
// what it was after that kernel.
struct Page {
  uint16_t writer[kPageBytes] = {};
  unsigned char value[kPageBytes];
};

struct Written {
  std::vector<std::string> kernels;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;  // by address / kPageBytes

  void clear() {
    kernels.clear();
    pages.clear();
  }

  Page* find(uintptr_t number) const {
    const auto found = pages.find(number);
    return found == pages.end() ? nullptr : found->second.get();
  }

  Page& at(uintptr_t number) {
    std::unique_ptr<Page>& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    return *page;
  }

  // Takes in what another kernel has written later.
  void add(const Written& later) {
    const auto first = static_cast<uint16_t>(kernels.size());
    kernels.insert(kernels.end(), later.kernels.begin(), later.kernels.end());
    for (const auto& [number, theirs] : later.pages) {
      Page& ours = at(number);
      for (size_t i = 0; i < kPageBytes; ++i) {
        if (theirs->writer[i] == 0) continue;
        ours.writer[i] = static_cast<uint16_t>(theirs->writer[i] + first);
        ours.value[i] = theirs->value[i];
      }
    }
  }
};

// Of one host thread, whose launches are one stream.
struct Stream {
  Written pending;  // what kernels write that may still run when the next one is launched with pdl
  Written own;      // what the kernel that runs has written
  Page* last_page = nullptr;
  uintptr_t last_number = 0;
};

thread_local Stream stream;
// The thread that runs a grid is inside of a kernel, and not in a launcher that the compiler
// reports on, too; and there is something to look for in what it reads.
thread_local __attribute__((tls_model("initial-exec"))) bool in_kernel = false;
thread_local __attribute__((tls_model("initial-exec"))) bool checks_reads = false;

struct Watch {
  uintptr_t first = 0, bytes = 0;
  uint64_t reads = 0;
};
Watch watch;

inline bool is_shared(const Block& block, const unsigned char* pointer) {
  return static_cast<size_t>(pointer - block.shared) < machine.launch->shared_bytes;
}

bool is_elsewhere(const unsigned char* pointer) {
  if (in_static_shared(pointer, 1)) return true;
  for (const Block& block : machine.blocks) {
    if (is_shared(block, pointer)) return true;
  }
  return false;
}

[[noreturn]] void refuse(const char* what, const void* pointer, size_t bytes,
                         const std::string& why) {
  fail(format("%s %s %zu bytes of global memory at %p before it has called wait_for_earlier()",
              thread_name(*machine.current).c_str(), what, bytes, pointer) +
       why);
}

}  // namespace

void check_read(const void* pointer, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(pointer);
  if (watch.bytes > 0 && first < watch.first + watch.bytes && watch.first < first + bytes)
    ++watch.reads;
  if (machine.current->waited || stream.pending.pages.empty()) return;
  uint16_t found = 0;
  for (uintptr_t at = first; at < first + bytes; ++at) {
    const Page* page = stream.pending.find(at / kPageBytes);
    if (page == nullptr) {
      at |= kPageBytes - 1;
      continue;
    }
    const uint16_t writer = page->writer[at % kPageBytes];
    if (writer == 0) continue;
    // What has another value by now was written by the host since, behind the kernel: with the
    // bytes beside it, of which some may be the same by chance.
    if (*reinterpret_cast<const unsigned char*>(at) != page->value[at % kPageBytes]) return;
    found = writer;
  }
  if (found == 0) return;
  refuse("reads", pointer, bytes,
         ", which a kernel writes that may still run: " + stream.pending.kernels[found - 1u]);
}

namespace {

// Of a write that is to no register and no local memory. Not inlined, because most writes are.
__attribute__((noinline)) void note_global_write(const void* pointer, size_t bytes) {
  const auto* place = static_cast<const unsigned char*>(pointer);
  if (is_shared(current_block(), place) || is_elsewhere(place)) return;
  if (!machine.current->waited)
    refuse("writes", pointer, bytes, ", so that a kernel that still runs may read or write them");
  const auto first = reinterpret_cast<uintptr_t>(pointer);
  for (uintptr_t at = first; at < first + bytes; ++at) {
    if (stream.last_page == nullptr || at / kPageBytes != stream.last_number) {
      stream.last_number = at / kPageBytes;
      stream.last_page = &stream.own.at(stream.last_number);
    }
    stream.last_page->writer[at % kPageBytes] = 1;
  }
}

inline void note_write(const void* pointer, size_t bytes) {
  const auto* place = static_cast<const unsigned char*>(pointer);
  if (place >= stacks_first && place < stacks_end) return;
  note_global_write(pointer, bytes);
}

}  // namespace

void begin_accesses() {
  stream.own.clear();
  stream.own.kernels.push_back(machine.launch->signature);
  stream.last_page = nullptr;
  if (!machine.launch->pdl) stream.pending.clear();
  in_kernel = true;
  checks_reads = watch.bytes > 0 || !stream.pending.pages.empty();
}

void end_accesses() {
  in_kernel = checks_reads = false;
  // Where the next kernel cannot start before this one has ended, nothing is pending; where this
  // one waited before it let the next one start, its own writes are.
  if (!machine.lets_next_start || !machine.lets_next_start_unawaited) stream.pending.clear();
  if (!machine.lets_next_start) return;
  for (const auto& [number, page] : stream.own.pages)
    std::memcpy(page->value, reinterpret_cast<const void*>(number * kPageBytes), kPageBytes);
  stream.pending.add(stream.own);
}

void let_next_start() {
  machine.lets_next_start = true;
  if (!machine.current->waited) machine.lets_next_start_unawaited = true;
  may_switch();
}

void wait_for_earlier() {
  machine.current->waited = true;
  may_switch();
}

}  // namespace emulator

// --- what the compiler calls ---------------------------------------------------------------------

extern "C" {

#define PHOTON_HIDDEN __attribute__((visibility("hidden")))

PHOTON_HIDDEN void __tsan_init() {}
PHOTON_HIDDEN void __tsan_read_range(void* pointer, size_t bytes) {
  if (emulator::checks_reads) emulator::check_read(pointer, bytes);
}
PHOTON_HIDDEN void __tsan_write_range(void* pointer, size_t bytes) {
  if (emulator::in_kernel) emulator::note_write(pointer, bytes);
}
PHOTON_HIDDEN void __tsan_vptr_update(void**, void*) {}

#define PHOTON_ACCESSES(bytes)                                                              \
  PHOTON_HIDDEN void __tsan_read##bytes(void* p) { __tsan_read_range(p, bytes); }           \
  PHOTON_HIDDEN void __tsan_write##bytes(void* p) { __tsan_write_range(p, bytes); }         \
  PHOTON_HIDDEN void __tsan_unaligned_read##bytes(void* p) { __tsan_read_range(p, bytes); } \
  PHOTON_HIDDEN void __tsan_unaligned_write##bytes(void* p) { __tsan_write_range(p, bytes); }
PHOTON_ACCESSES(1)
PHOTON_ACCESSES(2)
PHOTON_ACCESSES(4)
PHOTON_ACCESSES(8)
PHOTON_ACCESSES(16)
#undef PHOTON_ACCESSES

// Those of launchers, of which nothing is to be known.
#define PHOTON_ATOMICS(bits)                                                                       \
  PHOTON_HIDDEN uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int) { \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  PHOTON_HIDDEN void __tsan_atomic##bits##_store(volatile uint##bits##_t* p, uint##bits##_t v,     \
                                                 int) {                                            \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }
PHOTON_ATOMICS(8)
PHOTON_ATOMICS(32)
PHOTON_ATOMICS(64)
#undef PHOTON_ATOMICS

// For tests: counts the reads of kernels, and of copies that they start, from some memory.
__attribute__((visibility("default"))) void photon_emulator_watch(const void* first, size_t bytes) {
  emulator::watch = {reinterpret_cast<uintptr_t>(first), bytes, 0};
}
__attribute__((visibility("default"))) uint64_t photon_emulator_watched_reads() {
  return emulator::watch.reads;
}

}  // extern "C"
