#include "cpu/simd/simd.h"

#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace photon::cpu {

namespace baseline {
extern const SimdKernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const SimdKernels kernels;
}
namespace avx512 {
extern const SimdKernels kernels;
}
#endif

namespace {

struct Variant {
  const SimdKernels* kernels;
  bool runs_here;
};

#if defined(__x86_64__)

// Everything that -march=x86-64-v3 lets the compiler use. Not every compiler's
// __builtin_cpu_supports knows all the names.
bool has_v3() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kMovbe = 1u << 22, kF16c = 1u << 29, kLzcnt = 1u << 5;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kMovbe) == 0 || (ecx & kF16c) == 0)
    return false;
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kLzcnt) == 0) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

// And -march=x86-64-v4.
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

#endif

struct Choice {
  const SimdKernels* kernels;
  std::string error;  // empty: the choice is what was asked for
};

Choice choose() {
  const Variant variants[] = {
#if defined(__x86_64__)
      {&avx512::kernels, has_v4()},
      {&avx2::kernels, has_v3()},
#endif
      {&baseline::kernels, true},
  };
  const char* wanted = std::getenv("PHOTON_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string names;
  for (const Variant& variant : variants) {
    if (!variant.runs_here) continue;
    if (any || variant.kernels->name == std::string(wanted)) return {variant.kernels, {}};
    names += (names.empty() ? "" : ", ") + std::string(variant.kernels->name);
  }
  return {&baseline::kernels, "PHOTON_CPU_ISA is '" + std::string(wanted) +
                                  "', expected one of those that this machine runs: " + names +
                                  "; or unset it"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const SimdKernels& simd() { return *choice().kernels; }

const char* simd_error() { return choice().error.empty() ? nullptr : choice().error.c_str(); }

}  // namespace photon::cpu
