// What O would cost inside the clusters of attention, at one token, for what its own kernel costs.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -I csrc benchmarks/lab/o_in_attention.cu -o /tmp/o
//     /tmp/o
//
// At one token the eight query groups of a model have a cluster of eight CTAs each. If such a
// cluster multiplied its own outputs by their columns of O, there would be one kernel less a layer:
// eight partial sums of every output, which the next kernel adds up in order. Two chains of 2
// kernels a layer, launched early, in a graph:
//
//     apart    attention's end (the parts of a group meet in its cluster, outputs are stored), then
//              a kernel of 132 CTAs that loads all of x: gate/up's beginning
//     inside   attention's CTAs fill a ring of 64 KiB with O's weights before they wait; their
//              outputs go to all CTAs of the cluster; a CTA has an eighth of O's rows, and leaves a
//              float of each; the next kernel loads eight of them for each x, and the old x
//
// "inside" less "apart" is what O costs there at least: its weights are only added up, word by
// word, and no key or other weight is on its way. What its own kernel costs is measured in a step
// (benchmarks/lab/turns.py, what is left out: o).
//
// Predicted, before any run, us a layer: 0.6B 1.6 (0.8 for the second meeting, 0.3 for the
// products, 0.5 for eight loads in the place of one), 1B 3 (half of a CTA's 128 KiB are not in the
// ring), 4B 7.4 (64 SMs bring 17 MB at 2.9 TB/s). In a step without O's kernel: 2.3, 3 and 6.6
// less.
//
// The rule: O goes inside if a step of one token gains 5 % with the 0.6B and 2 % with the 4B, which
// is what was hoped for. It is little for an order of sums by KV head in every kernel of O, and for
// a way that only one token goes: of two tokens each cluster would read the weights anew.
#include <cuda.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "cuda/half_tile_map.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace {

using namespace photon::cuda;

constexpr int kGroups = 8, kRanks = 8, kThreads = 128, kNextThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRingBytes = 64 * 1024, kMostStages = 16, kRoom = 112 * 1024;
constexpr int kTurns = 21, kMostOutputs = 64;

struct Shape {
  const char* name;
  int layers, hidden, columns;  // columns: of O, of a KV head
};
constexpr Shape kShapes[] = {
    {"qwen3-0.6b", 28, 1024, 256}, {"llama-3.2-1b", 16, 2048, 256}, {"qwen3-4b", 36, 2560, 512}};

struct Params {
  HalfTileMap weight;
  uint4* x;          // [hidden / 8]: the residual stream, as it stays
  uint4* next;       // the same: what the next kernel leaves
  uint4* attention;  // [8 columns / 8]
  float* partial;    // [groups][hidden]
  int layer, hidden, columns, stages, stage_bytes;
};

struct Shared {
  alignas(1024) unsigned char ring[kRingBytes];
  Barrier full[kMostStages];
  float parts[kRanks][kMostOutputs], outputs[kRanks * kMostOutputs];
  uint32_t words[kNextThreads / kWarpSize];
};

__device__ uint32_t sum_of(uint4 v) { return v.x + v.y + v.z + v.w; }

__device__ uint32_t sum_of_warp(uint32_t v) {
  for (int way = kWarpSize / 2; way > 0; way /= 2) v += __shfl_xor_sync(~0u, v, way);
  return v;
}

// Requests one of the half tiles of the CTA's rows.
__device__ void request(const Params& p, Shared& shared, int number, int stage) {
  const int rows = p.hidden / kRanks;
  const int row = p.layer * p.hidden + static_cast<int>(cluster_rank()) * rows;
  const int group = static_cast<int>(blockIdx.x) / kRanks;
  arrive_expecting(&shared.full[stage], p.stage_bytes);
  copy_half_tile(shared.ring + stage * p.stage_bytes, p.weight, row + number * kHalfTileRows,
                 group * p.columns / kSliceColumns, &shared.full[stage], evict_first());
}

// Warps take half tiles by turns. The warp that has read one requests what comes into its place.
__device__ void multiply(const Params& p, Shared& shared, int half_tiles) {
  const int lane = threadIdx.x % kWarpSize;
  const int group = static_cast<int>(blockIdx.x) / kRanks;
  float* const out = p.partial + group * p.hidden + cluster_rank() * (p.hidden / kRanks);
  int stage = threadIdx.x / kWarpSize, parity = 0;
  for (int i = stage; i < half_tiles; i += kWarps) {
    wait_barrier(&shared.full[stage], parity);
    const uint4* words = reinterpret_cast<const uint4*>(shared.ring + stage * p.stage_bytes);
    uint32_t sum = 0;
#pragma unroll 8
    for (int j = lane; j < p.stage_bytes / 16; j += kWarpSize) sum += sum_of(words[j]);
    __syncwarp();
    if (i + p.stages < half_tiles && is_elected()) request(p, shared, i + p.stages, stage);
    sum = sum_of_warp(sum) + __float_as_int(shared.outputs[lane]);
    if (lane < kHalfTileRows) out[i * kHalfTileRows + lane] = static_cast<float>(sum);
    if ((stage += kWarps) < p.stages) continue;  // a multiple of the warps
    stage -= p.stages;
    parity ^= 1;
  }
}

template <bool kInside>
__global__ void __launch_bounds__(kThreads, 2) attention_end(const __grid_constant__ Params p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int rank = static_cast<int>(cluster_rank()), outputs = p.columns / kRanks;
  const int half_tiles = p.hidden / kRanks / kHalfTileRows, thread = threadIdx.x;
  let_next_start();
  if (kInside && thread < p.stages) init_barrier(&shared.full[thread], 1);
  if (thread < kWarpSize) fence_barriers();
  __syncthreads();
  if (kInside && thread < kWarpSize && is_elected())
    for (int i = 0; i < min(p.stages, half_tiles); ++i) request(p, shared, i, i);
  wait_for_earlier();
  const uint4 x = load_fresh_if(true, p.next + thread % (p.hidden / 8));
  const float part = static_cast<float>(sum_of(x));
  for (int i = thread; i < kRanks * outputs; i += kThreads)  // of each rank's outputs
    store_in_block(&shared.parts[rank][i % outputs], i / outputs, part);
  sync_cluster();
  float output = 0;
  if (thread < outputs)
    for (int i = 0; i < kRanks; ++i) output += shared.parts[i][thread];
  if (!kInside) {
    const int at = static_cast<int>(blockIdx.x) * outputs + thread;
    if (thread < outputs) reinterpret_cast<uint16_t*>(p.attention)[at] = static_cast<int>(output);
    sync_cluster();
    return;
  }
  if (thread < outputs)
    for (int i = 0; i < kRanks; ++i)
      store_in_block(&shared.outputs[rank * outputs + thread], i, output);
  sync_cluster();
  multiply(p, shared, half_tiles);
}

// Loads x, adds it up in all warps, and stores the part of it that is the CTA's.
template <bool kInside>
__global__ void __launch_bounds__(kNextThreads, 2) next_begin(const __grid_constant__ Params p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int vectors = p.hidden / 8;
  let_next_start();
  wait_for_earlier();
  uint32_t sum = 0;
  for (int i = threadIdx.x; i < vectors; i += kNextThreads) {
    uint4 x = load_fresh_if(true, kInside ? p.x + i : p.attention + i % (p.columns * kGroups / 8));
    if (kInside) {
      uint4 parts[kGroups][2];
      for (int group = 0; group < kGroups; ++group)
        for (int half = 0; half < 2; ++half)
          parts[group][half] = load_fresh_if(
              true, reinterpret_cast<const uint4*>(p.partial + group * p.hidden + i * 8) + half);
      float total = 0;
      for (int group = 0; group < kGroups; ++group)
        for (int half = 0; half < 2; ++half) {
          const uint4 v = parts[group][half];
          total += __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) +
                   __uint_as_float(v.w);
        }
      x.x += static_cast<uint32_t>(total);
    }
    sum += sum_of(x);
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % kWarpSize == 0) shared.words[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kNextThreads / kWarpSize; ++i) sum += shared.words[i];
  for (int i = blockIdx.x; i < vectors; i += gridDim.x)
    p.next[i] = {sum % 97, sum % 89, sum % 83, 1};
}

__global__ void make_words(uint32_t* words, size_t count) {
  const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads)
    words[i] = (static_cast<uint32_t>(i) * 1664525u + 1013904223u) >> 20;
}

template <bool kInside>
void add_layer(Params p, cudaStream_t stream) {
  LaunchShape shape{kGroups * kRanks, kThreads};
  shape.shared_bytes = kRoom;
  shape.cluster = kRanks;
  shape.pdl = true;
  CHECK(static_cast<cudaError_t>(launch(attention_end<kInside>, shape, stream, p)));
  shape = {sms(), kNextThreads, kRoom};
  shape.pdl = true;
  CHECK(static_cast<cudaError_t>(launch(next_begin<kInside>, shape, stream, p)));
}

template <bool kInside>
cudaGraphExec_t chain(Params p, int layers) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (p.layer = 0; p.layer < layers; ++p.layer) add_layer<kInside>(p, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&ready, graph));
  return ready;
}

float us_of(cudaGraphExec_t graph, int layers) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(begin));
  for (int i = 0; i < 4; ++i) CHECK(cudaGraphLaunch(graph, nullptr));
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  return 1e3f * ms / (4 * layers);
}

float middle(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const Shape& shape) {
  const int64_t columns = static_cast<int64_t>(shape.columns) * kGroups;
  const int64_t rows = static_cast<int64_t>(shape.layers) * shape.hidden;
  uint32_t* weight;
  Params p = {};
  CHECK(cudaMalloc(&weight, rows * columns * 2));
  CHECK(cudaMalloc(&p.x, shape.hidden * 2));
  CHECK(cudaMalloc(&p.next, shape.hidden * 2));
  CHECK(cudaMalloc(&p.attention, columns * 2));
  CHECK(cudaMalloc(&p.partial, kGroups * shape.hidden * sizeof(float)));
  CHECK(cudaMemset(p.x, 0, shape.hidden * 2));
  CHECK(cudaMemset(p.next, 0, shape.hidden * 2));
  CHECK(cudaMemset(p.attention, 0, columns * 2));
  make_words<<<4096, 256>>>(weight, rows * columns / 2);
  p.hidden = shape.hidden;
  p.columns = shape.columns;
  p.stage_bytes = kHalfTileRows * shape.columns * 2;
  p.stages = kRingBytes / p.stage_bytes;
  CHECK(static_cast<cudaError_t>(
      make_half_tile_map(p.weight, shape.columns / kSliceColumns, weight, rows, columns, columns)));
  const cudaGraphExec_t apart = chain<false>(p, shape.layers),
                        inside = chain<true>(p, shape.layers);
  std::vector<float> apart_us, inside_us;
  for (int turn = 0; turn <= kTurns; ++turn) {
    const float a = us_of(apart, shape.layers), i = us_of(inside, shape.layers);
    if (turn == 0) continue;  // warms up
    apart_us.push_back(a);
    inside_us.push_back(i);
  }
  const float a = middle(apart_us), i = middle(inside_us);
  std::printf(
      "{\"what\": \"o in attention\", \"model\": \"%s\", \"apart_us\": %.3f, \"inside_us\": %.3f, "
      "\"more_us\": %.3f}\n",
      shape.name, a, i, i - a);
  CHECK(cudaFree(weight));
}

}  // namespace

int main() {
  for (const Shape& shape : kShapes) measure(shape);
}
