// Whether one kernel for a whole decode step can keep memory busy while its sums meet: a ring of
// weights that runs on while the warps that multiply them stand still.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -I csrc benchmarks/lab/ring.cu -o /tmp/ring
//     /tmp/ring > ring.jsonl && tail -n 6 ring.jsonl
//
// A CTA an SM streams the weights of 36 layers of Qwen3-4B. One warp fills the ring by tensor
// copies; eight warps add up what comes. They stand still at the five ends of ops of each layer:
//
//     alone    each CTA for itself, for 0, 1, 2 or 4 us
//     meet     all CTAs wait for each other first (a counter in L2), and then for as long
//
// A stage of the ring is a tile of 16 KiB. It takes the warps as long as they need to add it up, or
// 0.3 us (`pace_us`): the decode kernels need 0.18 to 0.33 us, and memory brings a tile in 0.48.
//
// Predicted, before any run. `predict` below follows a CTA stage by stage: memory brings a stage of
// every CTA in 16 KiB x 132 / 4.5 TB/s, no request is answered sooner than after 1 us, and CTAs
// meet in 0.8 us. A stall then costs nothing up to about ring / bandwidth (1.4, 2.9, 4.3 and 6.2 us
// for 48, 96, 144 and 208 KiB), less one latency, and all of it beyond. Two stalls in a row count
// as one: attention lies between the ends of QKV and of itself, and brings a single stage.
//
//     us a layer      alone, 0 / 1 / 2 / 4 us       meet, 0 / 1 / 2 / 4 us
//     0.1 us a stage
//      48 KiB         45.7  48.9  53.9  63.9        47.9  52.9  57.9  67.9
//      96 KiB         45.7  45.7  48.2  58.2        45.7  47.2  52.2  62.2
//     144 KiB         45.7  45.7  46.1  52.5        45.7  45.7  47.7  56.5
//     208 KiB         45.7  45.7  45.7  48.5        45.7  45.7  45.8  50.9
//     0.3 us a stage
//      48 KiB         45.7  49.9  54.9  64.9        48.9  53.9  58.9  68.9
//      96 KiB         45.7  45.9  49.2  59.2        45.7  48.2  53.2  63.2
//     144 KiB         45.7  45.7  46.7  55.0        45.7  46.1  49.2  59.0
//     208 KiB         45.7  45.7  45.7  52.1        45.7  45.7  47.3  56.0
//
// The rest: from L2 (`cache`) 5.5 to 6.5 TB/s with rings of 96 KiB and more; without any copy
// (`nowhere`), so by the warps alone, 0.1 us a stage, 20 TB/s.
//
// The rule, at 208 KiB and 0.3 us a stage. Go if both hold, else the kernel is dropped for good:
//
//     alone at 2 us <= 1.03 x alone at 0 us      the ring absorbs what it should
//     meet at 1.4 us <= 51.6 us a layer          what a dependency costs beside the barrier: 0.6
//                                                until x is there, 0.3 for sums, 0.5 for stores. A
//                                                step of the 4B would take 2.05 ms for today's 2.28
//
// The sums of all CTAs are compared with those of a kernel that loads the same words plainly. The
// ways take turns; a line has the median of 11 turns.
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "check.h"
#include "cuda/half_tile_map.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace {

using namespace photon::cuda;

constexpr int kWarps = 8, kThreads = (kWarps + 1) * kWarpSize;
constexpr int kTurns = 11;
constexpr int kTileRows = 16, kColumns = 2560, kSlices = 8, kChunk = kSlices * kSliceColumns;
constexpr int kHalfTileBytes = kSlices * kSliceBytes, kStageBytes = 2 * kHalfTileBytes;
constexpr int kTileStages = kColumns / kChunk, kLayers = 36;

// Of a layer of the 4B, what a CTA of 132 reads between two ends of ops: QKV (31.5 MB), attention
// over 512 positions (2.1), O (21), gate/up (99.6) and down (49.8).
constexpr int kOps = 5, kOpStages[kOps] = {15, 1, 10, 46, 23};
constexpr int kLayerStages = 95, kLayerTiles = kLayerStages / kTileStages;
static_assert(kLayerTiles * kTileStages == kLayerStages);
constexpr int kCachedTiles = 1;  // of a CTA: 11 MB in all

constexpr int kRings[] = {3, 6, 9, 13}, kMaxStages = 13;  // in stages
constexpr double kStalls[] = {0, 1, 2, 4};                // us
constexpr double kPaces[] = {0, 0.3};                     // us a stage

enum class Source { kMemory, kCache, kNowhere };

struct Params {
  HalfTileMap weight;
  const uint4* words;  // of the weight
  uint32_t* sums;      // [cta][warp]
  unsigned* arrived;   // [layer][op], a cache line each: CTAs that have come to the end
  Source source;
  bool meets;
  int stages;
  int op_stages[kOps];
  int64_t stall, pace;  // clocks
  uint32_t zero;        // 0; see arrive()
};

constexpr int kCounterPitch = 32;  // of `arrived`

struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++index < stages) return;
    index = 0;
    parity ^= 1;
  }
};

// The first row of a CTA's tile; tiles are counted from the first layer on.
__device__ int tile_row(const Params& p, int tile) {
  if (p.source == Source::kCache)
    return (static_cast<int>(blockIdx.x) * kCachedTiles + tile % kCachedTiles) * kTileRows;
  const int layer = tile / kLayerTiles;
  return (static_cast<int>(layer * gridDim.x + blockIdx.x) * kLayerTiles + tile % kLayerTiles) *
         kTileRows;
}

// One thread: requests all stages that the CTA reads.
__device__ void fill(const Params& p, unsigned char* ring, Barrier* full, Barrier* empty) {
  const uint64_t policy = p.source == Source::kCache ? evict_last() : evict_first();
  Stage stage;
  for (int tile = 0; tile < kLayers * kLayerTiles; ++tile) {
    const int row = tile_row(p, tile);
    for (int chunk = 0; chunk < kTileStages; ++chunk, stage.advance(p.stages)) {
      Barrier* const done = &full[stage.index];
      unsigned char* const to = ring + stage.index * kStageBytes;
      wait_barrier(&empty[stage.index], stage.parity ^ 1);
      if (p.source == Source::kNowhere) {
        arrive(done);
        continue;
      }
      arrive_expecting(done, kStageBytes);
      copy_half_tile(to, p.weight, row, chunk * kSlices, done, policy);
      copy_half_tile(to + kHalfTileBytes, p.weight, row + kHalfTileRows, chunk * kSlices, done,
                     policy);
    }
  }
}

__device__ void stand_still(int64_t since, int64_t clocks) {
  while (clock64() - since < clocks) {
  }
}

// The eight warps: all have come to the end of an op, in all CTAs if `meets`.
__device__ void end_op(const Params& p, unsigned* arrived) {
  sync_threads(1, kWarps * kWarpSize);
  if (p.meets) {
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
      unsigned count = 0;
      while (count < gridDim.x)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
    }
    sync_threads(1, kWarps * kWarpSize);
  }
  stand_still(clock64(), p.stall);
}

// A warp: adds up its words of all that comes.
__device__ void add_up(const Params& p, const unsigned char* ring, Barrier* full, Barrier* empty) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t sum = 0;
  Stage stage;
  for (int end = 0; end < kLayers * kOps; ++end) {
    for (int i = 0; i < p.op_stages[end % kOps]; ++i, stage.advance(p.stages)) {
      wait_barrier(&full[stage.index], stage.parity);
      const int64_t began = clock64();
      const uint4* words = reinterpret_cast<const uint4*>(ring + stage.index * kStageBytes);
#pragma unroll
      for (int j = 0; j < kStageBytes / 16 / (kWarps * kWarpSize); ++j) {
        const uint4 v = words[j * kWarps * kWarpSize + threadIdx.x];
        sum += v.x + v.y + v.z + v.w;
      }
      if (p.pace > 0) stand_still(began, p.pace);
      __syncwarp();
      if (lane == 0) arrive(&empty[stage.index], sum & p.zero);
    }
    if (p.meets || p.stall > 0) end_op(p, p.arrived + end * kCounterPitch);
  }
  for (int way = kWarpSize / 2; way > 0; way /= 2) sum += __shfl_xor_sync(~0u, sum, way);
  if (lane == 0) p.sums[blockIdx.x * kWarps + warp] = sum;
}

__global__ void __launch_bounds__(kThreads, 1) stream(const __grid_constant__ Params p) {
  unsigned char* const ring = dynamic_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(ring + p.stages * kStageBytes);
  Barrier* const empty = full + kMaxStages;
  if (threadIdx.x < p.stages) {
    init_barrier(&full[threadIdx.x], 1);
    init_barrier(&empty[threadIdx.x], kWarps);
  }
  if (threadIdx.x < kWarpSize) fence_barriers();
  __syncthreads();
  if (threadIdx.x / kWarpSize < kWarps) {
    add_up(p, ring, full, empty);
  } else if (is_elected()) {
    fill(p, ring, full, empty);
  }
}

// What the CTAs' sums should be, with all words of a CTA in the sum of its first warp.
__global__ void add_up_plainly(const __grid_constant__ Params p, uint32_t* sums) {
  constexpr int kTileWords = kTileRows * kColumns / 8;
  uint32_t sum = 0;
  for (int tile = 0; tile < kLayers * kLayerTiles; ++tile) {
    const uint4* from = p.words + static_cast<int64_t>(tile_row(p, tile)) * (kColumns / 8);
    for (int i = threadIdx.x; i < kTileWords; i += blockDim.x)
      sum += from[i].x + from[i].y + from[i].z + from[i].w;
  }
  atomicAdd(&sums[blockIdx.x], sum);
}

__global__ void make_words(uint32_t* words, size_t count) {
  const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const uint32_t word = static_cast<uint32_t>(i) * 1664525u + 1013904223u;
    words[i] = (word ^ word >> 15) * 2246822519u;
  }
}

__global__ void spin(int64_t clocks) { stand_still(clock64(), clocks); }

// --- host ----------------------------------------------------------------------------------------

// Microseconds a layer, as the text above says; `stall`: what an end costs, barrier included.
double predict(int stages, double stall, double pace) {
  constexpr double kStageTime = kStageBytes * 132 / 4.5e6, kLatency = 1.0, kAddingUp = 0.1;
  std::vector<double> came, read;  // by stage: when it came, and when it was read
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const int op_stages : kOpStages) {
      for (int i = 0; i < op_stages; ++i) {
        const int n = static_cast<int>(read.size());
        const double asked = n < stages ? 0 : read[n - stages];
        came.push_back(std::max(asked + kLatency, n > 0 ? came[n - 1] + kStageTime : 0));
        read.push_back(std::max(came[n], n > 0 ? read[n - 1] : 0) + std::max(pace, kAddingUp));
      }
      read.back() += stall;
    }
  }
  return read.back() / kLayers;
}

struct Pool {
  uint32_t* words = nullptr;
  uint32_t* sums = nullptr;
  unsigned* arrived = nullptr;
  int64_t rows = static_cast<int64_t>(kLayers) * kLayerTiles * kTileRows * sms();

  Pool() {
    const size_t bytes = rows * kColumns * 2;
    CHECK(cudaMalloc(&words, bytes));
    CHECK(cudaMalloc(&sums, sms() * kWarps * sizeof(uint32_t)));
    CHECK(cudaMalloc(&arrived, arrived_bytes()));
    make_words<<<4096, 256>>>(words, bytes / 4);
    CHECK(cudaDeviceSynchronize());
  }
  static size_t arrived_bytes() { return kLayers * kOps * kCounterPitch * sizeof(unsigned); }
};

// Milliseconds of what `body` enqueues.
template <typename Body>
float timed(const Body& body) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
  }
  CHECK(cudaEventRecord(begin));
  body();
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  return ms;
}

// Clocks in a microsecond, as the SMs run now.
double clocks_per_us() {
  constexpr int64_t kClocks = 20'000'000;
  timed([] { spin<<<sms(), 32>>>(kClocks); });
  return kClocks / (1e3 * timed([] { spin<<<sms(), 32>>>(kClocks); }));
}

// One way to stream, and how long its turns took.
struct Way {
  const char* name;
  int stages;
  double stall, pace;
  Params p = {};
  std::vector<float> ms;

  Way(const Pool& pool, double clocks, Source source, bool meets, int stages, double stall,
      double pace)
      : name(source == Source::kCache     ? "cache"
             : source == Source::kNowhere ? "nowhere"
             : meets                      ? "meet"
                                          : "alone"),
        stages(stages),
        stall(stall),
        pace(pace) {
    p.words = reinterpret_cast<const uint4*>(pool.words);
    p.sums = pool.sums;
    p.arrived = pool.arrived;
    p.source = source;
    p.meets = meets;
    p.stages = stages;
    std::copy(std::begin(kOpStages), std::end(kOpStages), p.op_stages);
    p.stall = static_cast<int64_t>(stall * clocks);
    p.pace = static_cast<int64_t>(pace * clocks);
    CHECK(static_cast<cudaError_t>(
        make_half_tile_map(p.weight, kSlices, pool.words, pool.rows, kColumns, kColumns)));
  }

  double us_per_layer() const {
    std::vector<float> sorted(ms.begin() + 1, ms.end());  // the first warms up
    std::sort(sorted.begin(), sorted.end());
    return 1e3 * sorted[sorted.size() / 2] / kLayers;
  }

  // Cooperative: all CTAs are there at once, or the launch fails.
  void take_turn() {
    const size_t shared_bytes = stages * kStageBytes + 2 * kMaxStages * sizeof(Barrier);
    void* args[] = {&p};
    CHECK(cudaMemset(p.sums, 0xff, sms() * kWarps * sizeof(uint32_t)));
    CHECK(cudaMemset(p.arrived, 0, Pool::arrived_bytes()));
    ms.push_back(timed([&] {
      CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(stream), dim3(sms()),
                                        dim3(kThreads), args, shared_bytes, nullptr));
    }));
  }

  void check(const std::vector<uint32_t>& expected) const {
    std::vector<uint32_t> found(sms() * kWarps);
    CHECK(cudaMemcpy(found.data(), p.sums, found.size() * 4, cudaMemcpyDeviceToHost));
    for (int cta = 0; cta < sms(); ++cta) {
      uint32_t rest = expected[cta];
      for (int warp = 0; warp < kWarps; ++warp) rest -= found[cta * kWarps + warp];
      if (rest == 0) continue;
      std::fprintf(stderr, "%s, %d stages: the sum of CTA %d is not that of plain loads\n", name,
                   stages, cta);
      std::exit(1);
    }
  }

  void print() const {
    const double bytes = static_cast<double>(kLayerStages) * kStageBytes * sms();
    const bool streams = p.source == Source::kMemory;
    std::printf(
        "{\"way\": \"%s\", \"ring_kib\": %d, \"stall_us\": %g, \"pace_us\": %g, "
        "\"us_per_layer\": %.2f, \"predicted\": %.2f, \"tb_per_s\": %.3f}\n",
        name, stages * kStageBytes / 1024, stall, pace, us_per_layer(),
        streams ? predict(stages, stall + (p.meets ? 0.8 : 0), pace) : 0,
        bytes / us_per_layer() * 1e-6);
  }
};

std::vector<Way> all_ways(const Pool& pool, double clocks) {
  std::vector<Way> ways;
  for (const int stages : kRings) {
    for (const double pace : kPaces) {
      for (const bool meets : {false, true}) {
        for (const double stall : kStalls)
          ways.emplace_back(pool, clocks, Source::kMemory, meets, stages, stall, pace);
      }
    }
    for (const Source source : {Source::kCache, Source::kNowhere})
      ways.emplace_back(pool, clocks, source, false, stages, 0, 0);
  }
  return ways;
}

std::vector<uint32_t> plain_sums(const Params& p) {
  std::vector<uint32_t> sums(sms());
  CHECK(cudaMemset(p.sums, 0, sums.size() * 4));
  add_up_plainly<<<sms(), 1024>>>(p, p.sums);
  CHECK(cudaMemcpy(sums.data(), p.sums, sums.size() * 4, cudaMemcpyDeviceToHost));
  return sums;
}

void measure(std::vector<Way>& ways) {
  std::vector<uint32_t> expected[2];  // from memory, from L2
  for (const Way& way : ways) {
    if (way.p.source == Source::kNowhere) continue;
    std::vector<uint32_t>& sums = expected[way.p.source == Source::kCache];
    if (sums.empty()) sums = plain_sums(way.p);
  }
  for (int turn = 0; turn <= kTurns; ++turn) {
    for (Way& way : ways) {
      way.take_turn();
      if (turn % kTurns == 0 && way.p.source != Source::kNowhere)
        way.check(expected[way.p.source == Source::kCache]);
    }
  }
}

void print_rule(const std::vector<Way>& ways) {
  const auto at = [&](bool meets, double stall) {
    const auto found = std::find_if(ways.begin(), ways.end(), [&](const Way& way) {
      return way.p.source == Source::kMemory && way.p.meets == meets && way.stall == stall &&
             way.stages == kMaxStages && way.pace > 0;
    });
    return found->us_per_layer();
  };
  const double alone = at(false, 2) / at(false, 0),
               meet = at(true, 1) + 0.4 * (at(true, 2) - at(true, 1));
  std::printf("{\"alone_2_us\": %.3f, \"meet_1.4_us\": %.2f, \"rule\": \"%s\"}\n", alone, meet,
              alone <= 1.03 && meet <= 51.6 ? "go" : "drop");
}

}  // namespace

int main() {
  CHECK(cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMaxStages * kStageBytes + 2 * kMaxStages * sizeof(Barrier)));
  const Pool pool;
  const double clocks = clocks_per_us();
  std::vector<Way> ways = all_ways(pool, clocks);
  measure(ways);
  for (const Way& way : ways) way.print();
  std::printf("{\"clocks_per_us\": %.0f, \"after\": %.0f}\n", clocks, clocks_per_us());
  print_rule(ways);
}
