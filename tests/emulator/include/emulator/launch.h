// cudaLaunchKernelEx: the kernel runs at once.
#pragma once
#include <tuple>

#include "cuda_runtime_api.h"

namespace emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const char* signature,
                   void (*run)(const void* args), const void* args);

}  // namespace emulator

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  using Call = std::pair<void (*)(Params...), std::tuple<Params...>>;
  const Call call{kernel, std::tuple<Params...>(args...)};
  const auto run = [](const void* opaque) {
    const Call& own = *static_cast<const Call*>(opaque);
    std::apply(own.first, own.second);
  };
  return emulator::launch(*config, reinterpret_cast<const void*>(kernel), __PRETTY_FUNCTION__, run,
                          &call);
}
