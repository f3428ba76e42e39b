#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// void emulator_switch(void** save, void* load): keeps the callee-saved registers on the stack that
// is left, and takes those that lie on the stack that is continued.
#if defined(__x86_64__)
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size emulator_switch,.-emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch,.-emulator_switch
)");
#else
#error "the emulator of CUDA knows how to switch stacks on x86-64 and aarch64 only"
#endif

namespace emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 512 * 1024;
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif

// Stacks lie one after the other, each with a page below it that faults; they are made once and
// kept.
struct Stacks {
  static constexpr size_t kMost = size_t{8} * 1024;  // the threads of the largest cluster
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE)), each = guard + kStackBytes;
  unsigned char* const first = reserved(kMost * each);
  size_t made = 0;

  unsigned char* at(size_t index) {
    for (; made <= index; ++made) {
      if (mprotect(first + made * each + guard, kStackBytes, PROT_READ | PROT_WRITE) != 0)
        throw std::bad_alloc();
    }
    return first + index * each + guard;
  }

 private:
  static unsigned char* reserved(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<unsigned char*>(memory);
  }
};

Stacks stacks;

}  // namespace

unsigned char *const stacks_first = stacks.first, *const stacks_end =
                                                      stacks.first + Stacks::kMost * stacks.each;

void prepare_fiber(Fiber& fiber, size_t index, void (*entry)()) {
  fiber.stack = stacks.at(index);
  fiber.stack_bytes = kStackBytes;
  fiber.sanitizer_state = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack,
                                fiber.stack_bytes);  // of frames that were left for good
#endif
  // Tops at different distances from their page: the stacks of a block would otherwise all live in
  // the same few cache sets.
  const size_t shift = index * 576 % 8192;
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - shift);
#if defined(__x86_64__)
  top[-1] = nullptr;  // where a return address would be
  top[-2] = reinterpret_cast<void*>(entry);
  for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
  fiber.stack_pointer = top - 8;
#elif defined(__aarch64__)
  for (int i = 1; i <= 20; ++i) top[-i] = nullptr;
  top[-20 + 11] = reinterpret_cast<void*>(entry);  // x30
  fiber.stack_pointer = top - 20;
#endif
}

#if defined(__SANITIZE_ADDRESS__)
namespace {
Fiber* left = nullptr;  // by the switch that is under way
}

void fiber_started() {
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (left->stack == nullptr || left->stack_bytes == 0) {
    left->stack = const_cast<unsigned char*>(static_cast<const unsigned char*>(stack));
    left->stack_bytes = bytes;
  }
}

void switch_fiber(Fiber& from, Fiber& to, bool for_good) {
  left = &from;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.sanitizer_state, to.stack,
                                 to.stack_bytes);
  emulator_switch(&from.stack_pointer, to.stack_pointer);
  __sanitizer_finish_switch_fiber(from.sanitizer_state, nullptr, nullptr);
}
#else
void fiber_started() {}
#endif

}  // namespace emulator
