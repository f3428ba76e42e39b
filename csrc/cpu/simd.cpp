#include "cpu/simd/simd.h"

#include <cstdlib>
#include <cstring>

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

const SimdKernels& choose() {
#if defined(__x86_64__)
  const char* wanted = std::getenv("PHOTON_CPU_ISA");
  const auto allows = [&](const char* name) { return wanted == nullptr || std::strcmp(wanted, name) == 0; };
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allows("avx512")) return avx512::kernels;
  if (has_avx2 && allows("avx2")) return avx2::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

const SimdKernels& simd() {
  static const SimdKernels& chosen = choose();
  return chosen;
}

}  // namespace photon::cpu
