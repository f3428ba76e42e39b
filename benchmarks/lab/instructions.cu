// What instructions cost that are not in a SM's nearest cache: straight code of so many KiB in a
// loop.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a benchmarks/lab/instructions.cu -o /tmp/instructions &&
//     /tmp/instructions
//
// One warp a block, one block on one SM or on each. Clocks for each KiB (64 instructions), of the
// first turn of the loop and of a later one, the median block's; and of the later one the slowest
// block's. An instruction that is there takes one clock.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "check.h"

namespace {

constexpr int kTurns = 6, kChains = 8;  // chains: of instructions that wait for each other

template <int kKib>
__global__ void run(float* out, unsigned* clocks) {
  float chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = static_cast<float>(threadIdx.x + i);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const unsigned begin = static_cast<unsigned>(clock64());
#pragma unroll
    for (int i = 0; i < kKib * 64; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(chains[i % kChains]) : "f"(1.5f));
    const unsigned end = static_cast<unsigned>(clock64());
    if (threadIdx.x == 0) clocks[blockIdx.x * kTurns + turn] = end - begin;
  }
  float sum = 0;
  for (const float chain : chains) sum += chain;
  if (sum == 1.5f) *out = sum;  // so that the chains are needed
}

template <int kKib>
void measure(int blocks) {
  float* out;
  unsigned* clocks;
  std::vector<unsigned> all(blocks * kTurns);
  CHECK(cudaMalloc(&out, sizeof(float)));
  CHECK(cudaMalloc(&clocks, all.size() * sizeof(unsigned)));
  run<kKib><<<blocks, 32>>>(out, clocks);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(all.data(), clocks, all.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
  const auto of_turn = [&](int turn, double quantile) {
    std::vector<unsigned> found;
    for (int block = 0; block < blocks; ++block) found.push_back(all[block * kTurns + turn]);
    std::sort(found.begin(), found.end());
    return found[static_cast<size_t>(quantile * static_cast<double>(found.size() - 1))] /
           static_cast<double>(kKib);
  };
  std::printf("%4d KiB, %3d blocks: first turn %4.0f, later %4.0f, slowest %4.0f\n", kKib, blocks,
              of_turn(0, 0.5), of_turn(kTurns - 1, 0.5), of_turn(kTurns - 1, 1.0));
  CHECK(cudaFree(out));
  CHECK(cudaFree(clocks));
}

template <int... kKib>
void measure_all(int blocks) {
  (measure<kKib>(blocks), ...);
}

}  // namespace

int main() {
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  for (const int blocks : {1, sms})
    measure_all<4, 8, 16, 24, 32, 48, 64, 96, 112, 128, 144, 192, 256>(blocks);
  return 0;
}
