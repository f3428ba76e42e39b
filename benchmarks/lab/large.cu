// How the linears for many tokens should divide their work: every plan of
// csrc/cuda/linear/large_linear.cu at the shapes of a model, timed, and its bits compared with
// those of the first plan.
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I csrc benchmarks/lab/large.cu -o
//     /tmp/large && /tmp/large > large.jsonl
//
// A line is one launch's time, the median of 9 turns of 4 launches, whose weights are read from
// memory: there are copies enough that L2 does not hold them. `clocks` is what cost() expects, and
// the line with "chosen": true is the plan that the library takes. Bits: all plans give the same.
//
// Predicted, before any run, for the 4B in microseconds (QKV, O, gate/up, down). Bound by what L2
// gives at 128 and 256 tokens, by products from 1,024 on:
//
//     tokens   qkv   o    gate/up   down   all
//     128      14    11   27        26     78
//     256      17    14   36        30     97
//     1024     56    39   170       92     357
//     2048     110   76   335       180    700
//
// Found: 1.7 and 1.6 times as long at 128 and 256 tokens, and as predicted from 1,024 on. Clusters
// that shared tokens lost everywhere, and are gone; those that share rows win by 2 to 17 % from
// 1,024 tokens on.
#include "cuda/linear/large_linear.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Ends the program where a call of the CUDA runtime fails.
#define CHECK(call)                                                       \
  do {                                                                    \
    const cudaError_t error = (call);                                     \
    if (error != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

namespace {

using namespace photon::cuda;
using namespace photon::cuda::stream_linear;
using large::Plan;
using large::Shape;
using photon::Epilogue;

constexpr size_t kPoolBytes = size_t{1} << 30;
constexpr int kTurns = 9, kLaunches = 4;
constexpr int kMostTokens = 2048;

struct Linear {
  const char* name;
  int n, k;  // n: outputs
  bool is_swiglu, adds;
};

constexpr Linear kLinears[] = {
    {"qwen3-4b qkv", 6144, 2560, false, false},      {"qwen3-4b o", 2560, 4096, false, true},
    {"qwen3-4b gate_up", 9728, 2560, true, false},   {"qwen3-4b down", 2560, 9728, false, true},
    {"qwen3-0.6b qkv", 4096, 1024, false, false},    {"qwen3-0.6b o", 1024, 2048, false, true},
    {"qwen3-0.6b gate_up", 3072, 1024, true, false}, {"qwen3-0.6b down", 1024, 3072, false, true},
};
constexpr int kTokenCounts[] = {128, 256, 512, 1024, 2048};

__global__ void fill_noise(Bf16* to, size_t count, float deviation) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t word = static_cast<uint32_t>(i) * 2654435761u + 12345u;
    word ^= word >> 16;
    word *= 0x85ebca6bu;
    word ^= word >> 13;
    word *= 0xc2b2ae35u;
    word ^= word >> 16;
    to[i] = __float2bfloat16_rn((static_cast<float>(word) * (1.0f / 2147483648.0f) - 1.0f) *
                                deviation * 1.7f);
  }
}

__global__ void count_differences(const uint16_t* a, const uint16_t* b, size_t count,
                                  unsigned long long* differences) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    if (a[i] != b[i]) atomicAdd(differences, 1ull);
}

struct Memory {
  Bf16 *weights, *x, *out, *first, *before;
  float* scale;
  unsigned long long* differences;
  cudaStream_t stream;
  cudaEvent_t begin, end;

  Memory() {
    const size_t values = size_t{kMostTokens} * 10240;
    CHECK(cudaMalloc(&weights, kPoolBytes));
    for (Bf16** each : {&x, &out, &first, &before}) CHECK(cudaMalloc(each, values * 2));
    CHECK(cudaMalloc(&scale, kMostTokens * sizeof(float)));
    CHECK(cudaMallocManaged(&differences, sizeof(*differences)));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    fill_noise<<<1024, 256, 0, stream>>>(weights, kPoolBytes / 2, 0.02f);
    fill_noise<<<1024, 256, 0, stream>>>(x, values, 1.0f);
    fill_noise<<<1024, 256, 0, stream>>>(before, values, 1.0f);
    std::vector<float> ones(kMostTokens, 1.25f);
    CHECK(cudaMemcpy(scale, ones.data(), kMostTokens * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaStreamSynchronize(stream));
  }
};

struct Problem {
  Linear linear;
  Shape shape;
  stream_linear::Params op;
  Memory& memory;

  Problem(const Linear& linear, int tokens, Memory& memory)
      : linear(linear),
        shape{tokens, linear.n, linear.k, linear.is_swiglu, sms()},
        op{},
        memory(memory) {
    op.out = memory.out;
    op.out_stride = linear.n;
    op.tokens = tokens;
    op.n = linear.n;
    op.k = linear.k;
    op.split = linear.adds ? 2 : 1;
    op.k_each = static_cast<int>(ceil_div(ceil_div(op.k, kKChunk), op.split)) * kKChunk;
    op.is_swiglu = linear.is_swiglu;
  }

  size_t weight_values() const { return size_t{linear.is_swiglu ? 2u : 1u} * linear.n * linear.k; }

  void launch(const Plan& plan, int copy) const {
    large::Params p = large::tile_params(op);
    p.scale = memory.scale;
    const int copies = static_cast<int>(kPoolBytes / 2 / weight_values());
    const Bf16* const weight = memory.weights + copy % copies * weight_values();
    const auto run =
        linear.adds ? large::launch_tiles<Epilogue::kAdd> : large::launch_tiles<Epilogue::kStore>;
    CHECK(static_cast<cudaError_t>(
        run(p, shape, plan, memory.x, op.k, weight, op.k, true, memory.stream)));
  }

  unsigned long long differences(const Plan& plan, bool is_first) const {
    const size_t values = size_t(op.tokens) * linear.n;
    CHECK(cudaMemcpyAsync(memory.out, memory.before, values * 2, cudaMemcpyDeviceToDevice,
                          memory.stream));
    CHECK(cudaStreamSynchronize(memory.stream));
    launch(plan, 0);
    *memory.differences = 0;
    if (is_first)
      CHECK(cudaMemcpyAsync(memory.first, memory.out, values * 2, cudaMemcpyDeviceToDevice,
                            memory.stream));
    count_differences<<<264, 256, 0, memory.stream>>>(reinterpret_cast<uint16_t*>(memory.first),
                                                      reinterpret_cast<uint16_t*>(memory.out),
                                                      values, memory.differences);
    CHECK(cudaStreamSynchronize(memory.stream));
    return *memory.differences;
  }

  float us(const Plan& plan) const {
    std::vector<float> times;
    int copy = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      launch(plan, copy++);
      CHECK(cudaEventRecord(memory.begin, memory.stream));
      for (int i = 0; i < kLaunches; ++i) launch(plan, copy++);
      CHECK(cudaEventRecord(memory.end, memory.stream));
      CHECK(cudaEventSynchronize(memory.end));
      float ms = 0.0f;
      CHECK(cudaEventElapsedTime(&ms, memory.begin, memory.end));
      times.push_back(ms * 1000.0f / kLaunches);
    }
    std::nth_element(times.begin(), times.begin() + kTurns / 2, times.end());
    return times[kTurns / 2];
  }
};

void measure(const Problem& problem, const Plan& plan, const Plan& chosen, bool is_first) {
  const unsigned long long differences = problem.differences(plan, is_first);
  const float us = problem.us(plan);
  const bool is_chosen = plan.rows == chosen.rows && plan.is_paired == chosen.is_paired;
  const double flops = 2.0 * problem.op.tokens * static_cast<double>(problem.weight_values());
  std::printf(
      "{\"linear\": \"%s\", \"tokens\": %d, \"rows\": %d, \"paired\": %s, "
      "\"us\": %.2f, \"tflops\": %.0f, \"clocks\": %lld, \"differences\": %llu, \"chosen\": %s}\n",
      problem.linear.name, problem.op.tokens, plan.rows, plan.is_paired ? "true" : "false", us,
      flops / us * 1e-6, static_cast<long long>(large::cost(problem.shape, plan)), differences,
      is_chosen ? "true" : "false");
  std::fflush(stdout);
}

template <Epilogue kEpilogue>
void measure_all(const Problem& problem) {
  const Plan chosen = large::choose_plan<kEpilogue>(problem.shape);
  measure(problem, chosen, chosen, true);
  for (const int rows : large::kSizes) {
    if (!large::has_size<kEpilogue>(rows)) continue;
    for (const Plan& plan : {Plan{rows, false}, Plan{rows, true}}) {
      if (!large::can_run(problem.shape, plan)) continue;
      if (large::cost(problem.shape, plan) > 3 * large::cost(problem.shape, chosen)) continue;
      measure(problem, plan, chosen, false);
    }
  }
}

}  // namespace

int main() {
  Memory memory;
  for (const Linear& linear : kLinears) {
    for (const int tokens : kTokenCounts) {
      const Problem problem(linear, tokens, memory);
      if (linear.adds) {
        measure_all<Epilogue::kAdd>(problem);
      } else {
        measure_all<Epilogue::kStore>(problem);
      }
    }
  }
  return 0;
}
