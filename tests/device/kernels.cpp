// C functions that the device tests enqueue on CPU streams. Each takes a pointer to its params, as
// photon::HostKernel does.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>

extern "C" {

// params: int64 microseconds
void sleep_us(const void* params) {
  std::this_thread::sleep_for(std::chrono::microseconds(*static_cast<const int64_t*>(params)));
}

// params: address of an int32, factor, term. *address = *address * factor + term: its result
// depends on the order of calls.
struct MultiplyAdd {
  int32_t* address;
  int32_t factor, term;
};
void multiply_add(const void* params) {  // wraps around
  const auto& p = *static_cast<const MultiplyAdd*>(params);
  *p.address =
      static_cast<int32_t>(static_cast<uint32_t>(*p.address) * static_cast<uint32_t>(p.factor) +
                           static_cast<uint32_t>(p.term));
}

// params: address of an int32. Spins until it is not zero.
void wait_for_flag(const void* params) {
  auto* const flag = *static_cast<int32_t* const*>(params);
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0) std::this_thread::yield();
}

// params: addresses of two int32. Sets the first to 1, and spins until the second is not zero.
struct Hold {
  int32_t *runs, *flag;
};
void hold(const void* params) {
  const auto& p = *static_cast<const Hold*>(params);
  __atomic_store_n(p.runs, 1, __ATOMIC_RELEASE);
  wait_for_flag(&p.flag);
}

// Prints a line, unbuffered.
void print_line(const void*) {
  if (write(1, "worked\n", 7) != 7) throw std::runtime_error("write failed");
}

void fail_std(const void*) { throw std::runtime_error("the kernel's own words"); }
void fail_odd(const void*) { throw 7; }

}  // extern "C"
