// A thread of execution with a stack of its own, and the switch from one to another.
#pragma once
#include <cstddef>

namespace emulator {

struct Fiber {
  void* stack_pointer = nullptr;
  unsigned char* stack =
      nullptr;  // its lowest byte; null: the stack of the host thread that launched
  size_t stack_bytes = 0;
  void* sanitizer_state = nullptr;
};

// Makes `fiber` start at `entry`, which never returns, when it is switched to. `index` names one of
// the pooled stacks.
void prepare_fiber(Fiber& fiber, size_t index, void (*entry)());

// Where all stacks lie.
extern unsigned char *const stacks_first, *const stacks_end;

extern "C" void emulator_switch(void** save, void* load);

// Leaves `from` where it is and continues `to`. `for_good`: nobody switches back.
#if defined(__SANITIZE_ADDRESS__)
void switch_fiber(Fiber& from, Fiber& to, bool for_good = false);
#else
inline void switch_fiber(Fiber& from, Fiber& to, bool = false) {
  emulator_switch(&from.stack_pointer, to.stack_pointer);
}
#endif

// The first thing that an entry function calls.
void fiber_started();

}  // namespace emulator
