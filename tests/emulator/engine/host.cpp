// The runtime's host side.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "cuda.h"
#include "cuda_runtime_api.h"
#include "emulator/engine.h"
#include "emulator/launch.h"

namespace {

constexpr int kDefaultSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024,
              kSharedBytesOfMultiprocessor = 228 * 1024;
constexpr unsigned kMaxThreads = 1024, kMaxCluster = 8;

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string failure;

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

struct Attributes {
  std::mutex mutex;
  std::unordered_map<const void*, int>
      shared_bytes;  // of the kernels that asked for more than a launch gives by itself
};

Attributes& attributes() {
  static Attributes instance;
  return instance;
}

int allowed_shared_bytes(const void* kernel) {
  const std::lock_guard<std::mutex> lock(attributes().mutex);
  const auto found = attributes().shared_bytes.find(kernel);
  return found == attributes().shared_bytes.end() ? kDefaultSharedBytes : found->second;
}

int multiprocessors() {
  const char* text = std::getenv("PHOTON_EMULATOR_SMS");
  const int count = text == nullptr ? 4 : std::atoi(text);
  return count > 0 ? count : 4;
}

struct Capability {
  int major = 9, minor = 0;
};

Capability capability() {
  Capability found;
  const char* text = std::getenv("PHOTON_EMULATOR_COMPUTE_CAPABILITY");
  if (text != nullptr && std::sscanf(text, "%d.%d", &found.major, &found.minor) != 2) return {};
  return found;
}

// "kernel(photon::LinearParams, long int)" out of what the compiler calls the function that
// launches it.
std::string kernel_text(const std::string& function) {
  const size_t first = function.find("Params = {"), last = function.find('}', first);
  if (first == std::string::npos || last == std::string::npos) return function;
  return "(" + function.substr(first + 10, last - first - 10) + ")";
}

// The kernels that were launched, by their addresses in this library.
struct Launched {
  std::mutex mutex;
  std::set<const void*> kernels;
};

Launched& launched() {
  static Launched instance;
  return instance;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : remember(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kDefaultSharedBytes;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors();
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability().major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability().minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedBytesOfMultiprocessor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kMaxSharedBytes;
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > kMaxSharedBytes) return remember(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> lock(attributes().mutex);
  attributes().shared_bytes[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  int sms = 0;
  if (const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0))
    return error;
  *clusters = 2 * sms / static_cast<int>(config->gridDim.x);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  if (result != nullptr)
    *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorLaunchFailure:
      return failure.c_str();
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}

namespace emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const char* signature,
                   void (*run)(const void* args), const void* args) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const std::string text = kernel_text(signature);
  Launch one{{grid.x, grid.y, grid.z},
             {block.x, block.y, block.z},
             config.dynamicSmemBytes,
             1,
             false,
             kernel,
             text.c_str(),
             run,
             args};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      one.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      one.pdl = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  const uint64_t threads = uint64_t{block.x} * block.y * block.z,
                 blocks = uint64_t{grid.x} * grid.y * grid.z;
  const bool fits = threads > 0 && threads <= kMaxThreads && blocks > 0 && grid.x <= INT32_MAX &&
                    grid.y <= 65535 && grid.z <= 65535;
  if (!fits || one.cluster == 0 || one.cluster > kMaxCluster || grid.x % one.cluster != 0)
    return remember(cudaErrorInvalidConfiguration);
  if ((one.cluster > 1 || one.pdl) && capability().major < 9)
    return remember(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > static_cast<size_t>(allowed_shared_bytes(kernel)))
    return remember(cudaErrorInvalidValue);
  {
    const std::lock_guard<std::mutex> lock(launched().mutex);
    launched().kernels.insert(kernel);
  }
  return run_grid(one, failure) ? cudaSuccess : remember(cudaErrorLaunchFailure);
}

}  // namespace emulator

// Takes one of the kernels that were launched, each once: its offset in this library, by which a
// table of symbols has its name; 0: there is no more.
extern "C" __attribute__((visibility("default"))) uint64_t photon_emulator_take_kernel() {
  const std::lock_guard<std::mutex> lock(launched().mutex);
  if (launched().kernels.empty()) return 0;
  const char* const kernel =
      static_cast<const char*>(launched().kernels.extract(launched().kernels.begin()).value());
  Dl_info library = {};
  return dladdr(kernel, &library) == 0 ? 0 : kernel - static_cast<const char*>(library.dli_fbase);
}
