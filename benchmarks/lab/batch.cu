// The linears of a layer for a batch of tokens (csrc/cuda/linear/batch_linear.cuh): checked against
// a plain kernel, then timed as a chain under PDL whose weights come from memory, plan by plan.
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I csrc benchmarks/lab/batch.cu -o
//     /tmp/batch && /tmp/batch check && /tmp/batch tune qwen3-4b 128
//
// A chain's layer is QKV, O, sum and norm, gate/up, down, sum and norm: all but attention. `tune`
// prints microseconds a layer with the library's plans, then with one plan changed, the best twelve
// of each linear; what is faster is kept.
//
// Predicted, before any run, in microseconds a layer at 64, 128, 256 tokens: 4B 56, 64, 95; 0.6B
// 20, 24, 32; 8B 105, 115, 170. torch's kernels with the small ones beside them took 81 (4B, 128)
// and 106 (256), 32 and 35.5 (0.6B), and 4 more between kernels.
//
// Found: 4B 67.1, 74.7, 105 to 111 (the device slows down), 0.6B 23.4, 28.4, 40.5 (33.5 with tiles
// of few rows). By stamps (4B, 128 tokens, clocks of 1.98 GHz, medians) a layer's loops take 15.9,
// 9.2, 36.2 and 21.5 thousand, all at what memory gives; from a CTA's last output to the end of the
// next one's wait it is 2.5 to 4.9, until x is there 0.9, and 2 to 7 where the ring was not full
// before, sums to outputs 1.8 to 3.0, and the two norms 4.4 and 6.5. Lost: asking L2 for 2 to 16
// steps of the weight ahead (+0.5 to +7 us), letting the next kernel start behind the last request
// (+5), beginning at other columns in each CTA (+0.5), giving a stage back at once (-0.1 to +0.9),
// rings of 76 KiB beside one of 150 (+18), and tiles of 256 tokens.
#include "cuda/linear/batch_linear.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"

namespace photon::cuda::batch {
namespace {

constexpr size_t kPoolBytes = size_t{2} << 30;
constexpr int kMostTokens = 512;

struct Model {
  const char* name;
  int hidden, qkv, q, intermediate;
};

constexpr Model kModels[] = {{"qwen3-4b", 2560, 6144, 4096, 9728},
                             {"qwen3-0.6b", 1024, 4096, 2048, 3072},
                             {"qwen3-8b", 4096, 6144, 4096, 12288},
                             {"qwen3-1.7b", 2048, 4096, 2048, 6144}};

struct Linear {
  Finish finish;
  int n, k;

  size_t values() const { return size_t{finish == Finish::kSwiglu ? 2u : 1u} * n * k; }
  size_t rows() const { return size_t{finish == Finish::kSwiglu ? 2u : 1u} * n; }
};

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

// sums[token][row], a warp for each.
__global__ void plain_sums(float* sums, const Bf16* x, const Bf16* weight, int tokens, int rows,
                           int k) {
  const size_t index = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / 32;
  if (index >= size_t(tokens) * rows) return;
  const size_t token = index / rows, row = index % rows;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < k; i += 32)
    sum += to_float(x[token * k + i]) * to_float(weight[row * k + i]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[index] = sum;
}

struct Memory {
  Bf16 *weights, *normed, *residual, *qkv, *attention, *act, *gain, *bias;
  float *partial, *sums;
  int32_t* counts;
  cudaStream_t stream;
  cudaEvent_t begin, end;

  Memory() {
    const size_t values = size_t{kMostTokens} * 12288;
    CHECK(cudaMalloc(&weights, kPoolBytes));
    for (Bf16** each : {&normed, &residual, &qkv, &attention, &act, &gain, &bias})
      CHECK(cudaMalloc(each, values * 2));
    CHECK(cudaMalloc(&partial, size_t{512} << 20));
    CHECK(cudaMalloc(&sums, size_t{kMostTokens} * 24576 * 4));
    CHECK(cudaMalloc(&counts, 4));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    fill_noise<<<1024, 256, 0, stream>>>(weights, kPoolBytes / 2, 0.02f);
    for (Bf16* each : {normed, residual, qkv, attention, act, gain, bias})
      fill_noise<<<1024, 256, 0, stream>>>(each, values, 1.0f);
    CHECK(cudaStreamSynchronize(stream));
  }
};

Plan plan_of(int blocks, int rows, int splits, int x_stages, int room) {
  return with_rings({blocks, rows, splits, x_stages, 0, room});
}

Plan chosen_plan(const Linear& linear, int tokens) {
  return batch_plan(linear.finish, tokens, static_cast<int64_t>(linear.rows()), linear.k / 64);
}

void launch_linear(const Linear& linear, const Plan& plan, int tokens, const Bf16* x,
                   const Bf16* weight, Bf16* out, float* partial, const Bf16* bias,
                   const int32_t* counts, cudaStream_t stream) {
  Params p{};
  p.out = out;
  p.partial = partial;
  p.bias = bias;
  p.counts = counts;
  p.out_stride = linear.n;
  p.tokens = tokens;
  p.n = linear.n;
  LinearParams op{};
  op.x = x;
  op.x_stride = linear.k;
  op.weight = {weight, static_cast<int64_t>(linear.rows()), linear.k, linear.k,
               WeightFormat::kDense};
  op.pdl = true;
  const auto run = linear.finish == Finish::kOutput   ? launch_plan<Finish::kOutput>
                   : linear.finish == Finish::kSwiglu ? launch_plan<Finish::kSwiglu>
                                                      : launch_plan<Finish::kPartial>;
  CHECK(static_cast<cudaError_t>(run(p, plan, op, stream)));
}

void launch_norm(Memory& m, int tokens, int n, int splits, const Bf16* bias,
                 const int32_t* counts) {
  const SumNormParams p{m.normed, m.residual, m.partial, bias, m.gain, counts,
                        n,        n,          tokens,    n,    splits, 1e-6f};
  CHECK(static_cast<cudaError_t>(launch_sum_norm(p, true, m.stream)));
}

// --- check ---------------------------------------------------------------------------------------

float host(const Bf16& v) { return __bfloat162float(v); }

template <typename T>
std::vector<T> fetched(const T* from, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

void check(Memory& m, const Linear& linear, const Plan& plan, int tokens, int active) {
  const size_t rows = linear.rows();
  CHECK(cudaMemcpy(m.counts, &active, 4, cudaMemcpyHostToDevice));
  const Bf16* const weight = m.weights + 4096;
  plain_sums<<<(tokens * rows + 7) / 8, 256, 0, m.stream>>>(m.sums, m.normed, weight, tokens,
                                                            static_cast<int>(rows), linear.k);
  CHECK(cudaMemsetAsync(m.act, 0xff, size_t(tokens) * linear.n * 2, m.stream));
  fill_noise<<<1024, 256, 0, m.stream>>>(m.residual, size_t(tokens) * linear.n, 1.0f);
  CHECK(cudaStreamSynchronize(m.stream));
  const auto before = fetched(m.residual, size_t(tokens) * linear.n);
  const auto gain = fetched(m.gain, linear.n);
  const auto bias = fetched(m.bias, rows);
  launch_linear(linear, plan, tokens, m.normed, weight, m.act, m.partial, m.bias, m.counts,
                m.stream);
  Bf16* const x = m.normed;
  m.normed = m.qkv;  // of the norm's output
  if (linear.finish == Finish::kPartial)
    launch_norm(m, tokens, linear.n, plan.splits, m.bias, m.counts);
  CHECK(cudaStreamSynchronize(m.stream));
  const auto sums = fetched(m.sums, size_t(tokens) * rows);
  const auto out =
      fetched(linear.finish == Finish::kPartial ? m.residual : m.act, size_t(tokens) * linear.n);
  const auto normed = fetched(m.normed, size_t(tokens) * linear.n);
  m.normed = x;
  double worst = 0.0, worst_norm = 0.0;
  size_t touched = 0;
  for (int token = 0; token < tokens; ++token) {
    const float* const sum = sums.data() + token * rows;
    double squares = 0.0;
    for (int i = 0; i < linear.n; ++i) {
      const size_t at = size_t(token) * linear.n + i;
      if (linear.finish == Finish::kPartial) squares += double(host(out[at])) * host(out[at]);
      if (token >= active) {
        uint16_t bits;
        std::memcpy(&bits, &out[at], 2);
        uint16_t old = 0xffff;
        if (linear.finish == Finish::kPartial) std::memcpy(&old, &before[at], 2);
        touched += bits != old;
        continue;
      }
      double expected = sum[i] + host(bias[i]), scale = 1.0;
      if (linear.finish == Finish::kSwiglu) {
        const double up = sum[linear.n + i] + host(bias[linear.n + i]);
        expected = expected / (1.0 + std::exp(-expected)) * up;
        scale = 1.0 + std::fabs(up);
      }
      if (linear.finish == Finish::kPartial) expected += host(before[at]);
      worst = std::max(worst, std::fabs(host(out[at]) - expected) / (scale + std::fabs(expected)));
    }
    if (linear.finish != Finish::kPartial || token >= active) continue;
    const double scale = 1.0 / std::sqrt(squares / linear.n + 1e-6);
    for (int i = 0; i < linear.n; ++i) {
      const size_t at = size_t(token) * linear.n + i;
      const double expected = host(out[at]) * scale * host(gain[i]);
      worst_norm = std::max(worst_norm,
                            std::fabs(host(normed[at]) - expected) / (1.0 + std::fabs(expected)));
    }
  }
  const bool is_good = worst < 0.01 && worst_norm < 0.01 && touched == 0;
  std::printf(
      "%s finish %d n %d k %d tokens %d active %d: blocks %d rows %d splits %d: %.4f %.4f %zu\n",
      is_good ? "ok" : "BAD", static_cast<int>(linear.finish), linear.n, linear.k, tokens, active,
      plan.blocks, plan.rows, plan.splits, worst, worst_norm, touched);
}

void check_all(Memory& m) {
  const Linear linears[] = {
      {Finish::kOutput, 1544, 640}, {Finish::kSwiglu, 1000, 640}, {Finish::kPartial, 1032, 1088}};
  const std::pair<int, int> sizes[] = {{64, 64}, {65, 65}, {128, 128}, {100, 37}, {300, 300}};
  for (const Linear& linear : linears)
    for (const auto& [tokens, active] : sizes)
      for (const int blocks : {1, 2})
        for (const int rows : kBatchRows)
          for (const int splits : {1, 2, 4}) {
            if (!has_batch_rows(linear.finish, rows)) continue;
            if (linear.finish == Finish::kSwiglu && splits > 1) continue;
            if (linear.finish == Finish::kOutput && splits > blocks) continue;
            const int room = rows > 160 ? kOnlyBlock : kSmallerBlock;
            check(m, linear, plan_of(blocks, rows, splits, 2 + rows / 8 % 2, room), tokens, active);
          }
}

// --- time ----------------------------------------------------------------------------------------

enum Which { kQkv, kO, kGateUp, kDown };
constexpr const char* kNames[] = {"qkv", "o", "gate_up", "down"};

struct Chain {
  Memory& m;
  Model model;
  int tokens;
  Linear linears[4];
  Plan plans[4];

  Chain(Memory& m, const Model& model, int tokens)
      : m(m),
        model(model),
        tokens(tokens),
        linears{{Finish::kOutput, model.qkv, model.hidden},
                {Finish::kPartial, model.hidden, model.q},
                {Finish::kSwiglu, model.intermediate, model.hidden},
                {Finish::kPartial, model.hidden, model.intermediate}} {
    for (int i = 0; i < 4; ++i) plans[i] = chosen_plan(linears[i], tokens);
  }

  void layer(int index) {
    size_t layer_values = 0;
    for (const Linear& each : linears) layer_values += each.values();
    const size_t fits = kPoolBytes / 2 / layer_values;
    const Bf16* weight = m.weights + index % fits * layer_values;
    const auto run = [&](Which which, const Bf16* x, Bf16* out) {
      launch_linear(linears[which], plans[which], tokens, x, weight, out, m.partial, nullptr,
                    nullptr, m.stream);
      weight += linears[which].values();
    };
    run(kQkv, m.normed, m.qkv);
    run(kO, m.attention, nullptr);
    launch_norm(m, tokens, model.hidden, plans[kO].splits, nullptr, nullptr);
    run(kGateUp, m.normed, m.act);
    run(kDown, m.act, nullptr);
    launch_norm(m, tokens, model.hidden, plans[kDown].splits, nullptr, nullptr);
  }

  // Microseconds a layer.
  double us(int repeats = 5) {
    constexpr int kLayers = 12;
    CHECK(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLayers; ++i) layer(i);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(m.stream, &graph));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < repeats + 1; ++i) {
      CHECK(cudaGraphLaunch(exec, m.stream));  // one in front, so that the host is ahead
      CHECK(cudaEventRecord(m.begin, m.stream));
      CHECK(cudaGraphLaunch(exec, m.stream));
      CHECK(cudaEventRecord(m.end, m.stream));
      CHECK(cudaEventSynchronize(m.end));
      float ms = 0.0f;
      CHECK(cudaEventElapsedTime(&ms, m.begin, m.end));
      if (i > 0) times.push_back(ms * 1000.0f / kLayers);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }
};

// Tiles that are about as good as those that are chosen, with other rings.
std::vector<Plan> candidates(const Linear& linear, int tokens) {
  std::vector<Plan> plans;
  for (const int blocks : {1, 2})
    for (const int rows : kBatchRows)
      for (const int splits : {1, 2, 4}) {
        if (!has_batch_rows(linear.finish, rows) || (blocks == 2 && tokens <= 64)) continue;
        const int most = linear.finish == Finish::kPartial  ? kBatchSplits
                         : linear.finish == Finish::kOutput ? blocks
                                                            : 1;
        if (splits > most) continue;
        const int64_t ctas = ceil_div(tokens, blocks * 64) *
                             ceil_div(static_cast<int64_t>(linear.rows()), rows) * splits;
        if (ctas < 40 || ctas > 2 * kBatchSms) continue;
        for (const int room : {kSmallerBlock, kOnlyBlock})
          for (const int x_stages : {2, 3, 4, 6}) {
            const bool is_larger = room == kSmallerBlock && linear.finish == Finish::kPartial;
            const Plan plan =
                plan_of(blocks, rows, splits, x_stages, is_larger ? kLargerBlock : room);
            if (plan.weight_stages >= 2) plans.push_back(plan);
          }
      }
  return plans;
}

void print(const Chain& chain, const char* what, const Plan& plan, double us) {
  std::printf(
      "{\"model\": \"%s\", \"tokens\": %d, \"what\": \"%s\", \"tile\": %d, \"rows\": %d, "
      "\"splits\": %d, \"x_stages\": %d, \"weight_stages\": %d, \"shared\": %d, \"us\": %.2f}\n",
      chain.model.name, chain.tokens, what, plan.blocks * 64, plan.rows, plan.splits, plan.x_stages,
      plan.weight_stages, plan.shared_bytes, us);
}

void tune(Memory& m, const Model& model, int tokens) {
  Chain chain(m, model, tokens);
  double best = chain.us(9);
  for (int which = 0; which < 4; ++which)
    print(chain, (std::string("chosen ") + kNames[which]).c_str(), chain.plans[which], best);
  for (const Which which : {kGateUp, kDown, kQkv, kO}) {
    best = chain.us(9);  // the device slows down and speeds up again
    Plan kept = chain.plans[which];
    std::vector<std::pair<double, Plan>> found;
    for (const Plan& plan : candidates(chain.linears[which], tokens)) {
      chain.plans[which] = plan;
      const double us = chain.us(3);
      found.push_back({us, plan});
      if (us >= best) continue;
      best = us;
      kept = plan;
    }
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < std::min<size_t>(found.size(), 12); ++i)
      print(chain, kNames[which], found[i].second, found[i].first);
    chain.plans[which] = kept;
  }
  best = chain.us(9);
  for (int which = 0; which < 4; ++which)
    print(chain, (std::string("best ") + kNames[which]).c_str(), chain.plans[which], best);
}

}  // namespace
}  // namespace photon::cuda::batch

int main(int count, char** words) {
  using namespace photon::cuda::batch;
  Memory memory;
  const std::string what = count > 1 ? words[1] : "";
  if (what == "check") check_all(memory);
  if (what != "tune" || count < 4) return 0;
  for (const Model& model : kModels) {
    if (std::strcmp(model.name, words[2]) != 0) continue;
    for (int i = 3; i < count; ++i) tune(memory, model, std::atoi(words[i]));
  }
  return 0;
}
