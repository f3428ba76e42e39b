// What it costs that partial sums of all blocks meet, beside what a dependency costs: whether three
// dependencies a layer can beat five.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a benchmarks/lab/reduction.cu -o /tmp/reduction
//     /tmp/reduction
//
// Where a block goes from its slice of gate/up straight into its columns of down, every block has a
// part of every output, and the parts of all blocks have to be added, in an order that does not
// depend on chance. Integers add up to the same in any order: so each block adds its parts, as
// fixed point, to sums in L2. Chains of kernels, each launched early, in a CUDA graph; a kernel
// reads all inputs of all tokens, as a linear does, and leaves outputs in one of these ways:
//
//     own      each block stores its own outputs: the dependency as it is
//     meet     each block adds to all outputs, 64-bit fixed point, by reductions in L2
//     meet32   the same in 32 bits
//
// "meet" less "own" is what the reduction costs more than a kernel without one, and "own" what the
// dependency costs that it saves. The sums are compared with those of a host.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.h"

namespace {

constexpr int kThreads = 256, kKernels = 64, kReplays = 20;

enum class Way { kOwn, kMeet, kMeet32 };

__device__ int64_t load_sum(const int64_t* from) {
  int64_t v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

__device__ int32_t load_sum(const int32_t* from) {
  int32_t v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ void add_to(int64_t* to, int64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
__device__ void add_to(int32_t* to, int32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

// Reads `in`, leaves sums in `out`, and clears `next`, to which the kernel after it adds. A block's
// part of output i is how many inputs are odd, + i % 7 + block % 5: something that depends on all
// inputs.
template <Way kWay, typename Sum>
__global__ void __launch_bounds__(kThreads) link(const Sum* in, Sum* out, Sum* next, int outputs) {
  asm volatile("griddepcontrol.launch_dependents;");
  __shared__ int partial[kThreads / 32];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int low = 0;
  for (int i = threadIdx.x; i < outputs; i += kThreads)
    low += static_cast<int>(load_sum(in + i) & 1);
  low = __reduce_add_sync(~0u, low);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = low;
  __syncthreads();
  low = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) low += partial[warp];
  const int first = blockIdx.x * outputs / gridDim.x, end = (blockIdx.x + 1) * outputs / gridDim.x;
  if constexpr (kWay == Way::kOwn) {
    for (int i = first + threadIdx.x; i < end; i += kThreads) {
      Sum sum = 0;
      for (int block = 0; block < 5; ++block)
        sum += low + i % 7 + block;  // as if the five kinds of blocks had met
      out[i] = sum;
    }
  } else {
    for (int i = first + threadIdx.x; i < end; i += kThreads) next[i] = 0;
    for (int i = threadIdx.x; i < outputs; i += kThreads) {
      // Blocks begin at different places, so that they do not queue for the same sums.
      int at = i + first;
      if (at >= outputs) at -= outputs;
      add_to(out + at, static_cast<Sum>(low + at % 7 + static_cast<int>(blockIdx.x % 5)));
    }
  }
}

template <Way kWay, typename Sum>
void launch(cudaStream_t stream, int blocks, const Sum* in, Sum* out, Sum* next, int outputs) {
  cudaLaunchAttribute pdl = {};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &pdl;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, link<kWay, Sum>, in, out, next, outputs));
}

// What `kKernels` links leave, on the host.
template <Way kWay, typename Sum>
std::vector<Sum> expected(int blocks, int outputs) {
  std::vector<Sum> in(outputs, 0), out(outputs);
  for (int k = 0; k < kKernels; ++k) {
    Sum low = 0;
    for (const Sum sum : in) low += sum & 1;
    const Sum blocks_met = kWay == Way::kOwn ? 5 : blocks;
    Sum of_blocks = 0;
    for (int block = 0; block < blocks_met; ++block) of_blocks += block % 5;
    for (int i = 0; i < outputs; ++i) out[i] = blocks_met * (low + i % 7) + of_blocks;
    in = out;
  }
  return in;
}

// Microseconds a kernel, the median of the replays.
template <Way kWay, typename Sum>
double measure(int blocks, int outputs) {
  Sum* sums[3];
  for (Sum*& place : sums) CHECK(cudaMalloc(&place, outputs * sizeof(Sum)));
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (Sum* place : sums) CHECK(cudaMemsetAsync(place, 0, outputs * sizeof(Sum), stream));
  for (int k = 0; k < kKernels; ++k)
    launch<kWay, Sum>(stream, blocks, sums[k % 3], sums[(k + 1) % 3], sums[(k + 2) % 3], outputs);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(replay, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  std::vector<Sum> found(outputs);
  CHECK(
      cudaMemcpy(found.data(), sums[kKernels % 3], outputs * sizeof(Sum), cudaMemcpyDeviceToHost));
  if (found != expected<kWay, Sum>(blocks, outputs)) {
    std::fprintf(stderr, "%d outputs: the sums are not the host's\n", outputs);
    std::exit(1);
  }
  for (Sum* place : sums) CHECK(cudaFree(place));
  std::sort(times.begin(), times.end());
  return times[kReplays / 2] * 1e3 / kKernels;
}

}  // namespace

int main() {
  int blocks = 0;
  CHECK(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  std::printf("%d blocks; microseconds a kernel\n%8s %6s %8s %8s %8s\n", blocks, "hidden", "tokens",
              "own", "meet", "meet32");
  for (const int hidden : {1024, 2048, 2560, 4096}) {
    for (const int tokens : {1, 2, 4, 8}) {
      const int outputs = hidden * tokens;
      std::printf("%8d %6d %8.2f %8.2f %8.2f\n", hidden, tokens,
                  measure<Way::kOwn, int64_t>(blocks, outputs),
                  measure<Way::kMeet, int64_t>(blocks, outputs),
                  measure<Way::kMeet32, int32_t>(blocks, outputs));
      std::fflush(stdout);
    }
  }
}
