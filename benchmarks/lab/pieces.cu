// What it costs to stream weights in pieces of 128 bytes, where kernels read pieces of 1 KB today.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -I csrc benchmarks/lab/pieces.cu -o /tmp/pieces
//     /tmp/pieces > pieces.jsonl && tail -n 60 pieces.jsonl
//
// A linear adds up eight slices of the columns, each with a sum of its own (csrc/README.md). Slice
// j is the columns 512 c + 64 j .. + 63. A kernel that walked slice by slice would need one running
// sum and one total in the place of four sums. Two ways lead there:
//
//     A   the slices stay, and so do all bits. The kernel for many tokens reads 128 bytes of a row,
//         and the 128 bytes beside them when it has been through all columns of the slice.
//     B   slice j becomes the columns j k/8 .. (j + 1) k/8 - 1, and all bits change once. The
//         kernel for many tokens reads a row from left to right. The kernel for few tokens reads
//         eight pieces of 128 bytes of a row, k/8 columns apart; their neighbours come next.
//
// Predicted, before any run. A sector of memory is 32 bytes and an open page 1 KB, so a piece of
// 128 bytes wastes no bytes, but may open a page for itself: one in about 5 ns for each of the 192
// channels, which is near what a channel can do. Neighbours that are asked for within a microsecond
// should often meet in an open page.
//
//     today, both kernels       0.97 to 1.00 of what a kernel that only reads reaches
//     A against today           0.92: 0.96 at k = 1024, 0.88 in parts of 5,120 columns
//     A, L2 fetches 256 bytes   0.97: the second piece is found in L2
//     A, boxes of 8 rows        as A, 0.02 less with 48 KB: eight times as many requests
//     B, many tokens            0.99
//     B, few tokens             0.95, of wide gate/up 0.92 (neighbours come 160 KB later)
//
// The rule. a, b_wide and b_narrow are means over the shapes, against today's boxes: for many
// tokens with a ring of 192 KB and a CTA an SM, for few with 96 KB and two CTAs; each with the
// fetch that suits it best, today's boxes too.
//
//     a >= 0.95            A from 9 tokens on
//     else both b >= 0.99  B: steps of few tokens may lose 1 % at most
//     else a >= 0.85       A beyond 32 tokens. A layer of the 4B, 47 us of reading, should gain 10
//                          us at 64 tokens by fewer sums and 4 at 32, and the slower stream costs
//                          47 (1 / a - 1)
//     else a >= 0.60       A beyond 200 tokens, where products take longer than weights. Four sums
//                          allow tiles of 128 tokens by 48 rows, for which shared memory works
//                          twice as long as the tensor cores
//     else                 the order and the kernels stay
//
// Every CTA has a ring, which three warps fill by tensor copies, and eight warps that add up all
// its words. The sums of each block of rows are compared with the host's. A launch streams 1.2 to 2
// GB. The ways take turns of four launches, and a line has the median of 20 turns. Rows: what a CTA
// reads of some columns before it goes on to others, a pass for few tokens, a tile of 128 for many.
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace {

using namespace photon::cuda;

constexpr int kWarps = 8, kFillers = 3, kThreads = (kWarps + kFillers) * kWarpSize;
constexpr int kTurns = 20, kLaunches = 4;  // of a way; of a turn, one behind the other
constexpr int kSlice = 64, kSlices = 8, kChunk = kSlice * kSlices;  // columns
constexpr int kStageBytes = 16 * 1024, kMaxStages = 12;
constexpr int kPassTiles = 10, kTileRows = 16;  // for few tokens
constexpr int kWideRows = 128;                  // of a tile, for many
constexpr size_t kPoolBytes = size_t{2} << 30;

struct Params {
  CUtensorMap weight[2];  // by part of the columns
  uint32_t* sums;         // [unit][warp]
  int stages, waves, parts, rows, box_rows, box_slices, box_bytes;
  int columns[2], some[2];  // of the parts; as copies see them: [some][width]
  bool keeps;               // L2 treats what comes as usual; else it makes room first
  uint32_t zero;            // 0; see arrive()
};

// A block of rows, of one part of the columns. Each CTA takes one in every wave, and changes parts
// from wave to wave, because the second may be smaller.
struct Unit {
  int number, part, row;

  __host__ __device__ Unit(const Params& p, int wave, int cta, int ctas)
      : number(wave * ctas + cta), part((cta + wave) % p.parts), row(number / p.parts * p.rows) {}

  __device__ int stages(const Params& p) const {
    return p.rows * p.columns[part] * 2 / kStageBytes;
  }
};

struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++index < stages) return;
    index = 0;
    parity ^= 1;
  }
};

// One thread: requests a stage of a unit, whose first box is number `box`. The boxes of a stage
// differ in their rows alone, which are a multiple of a tile's.
__device__ void fill_stage(const Params& p, const Unit& unit, int box, unsigned char* to,
                           Barrier* full, uint64_t policy) {
  const int row_boxes = p.rows / p.box_rows, some = p.some[unit.part],
            slice = box / row_boxes * p.box_slices;
  TensorPlace at{slice / some * kSlice, unit.row + box % row_boxes * p.box_rows, slice % some};
  arrive_expecting(full, kStageBytes);
  for (int filled = 0; filled < kStageBytes; filled += p.box_bytes, at.row += p.box_rows)
    tensor_copy(to + filled, &p.weight[unit.part], at, full, policy);
}

// One thread of a warp: of all stages that the CTA reads, requests those whose turn is `turn`.
__device__ void fill(const Params& p, unsigned char* ring, Barrier* full, Barrier* empty,
                     int turn) {
  const uint64_t policy = p.keeps ? evict_normal() : evict_first();
  Stage stage;
  for (int wave = 0; wave < p.waves; ++wave) {
    const Unit unit(p, wave, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const int stages = unit.stages(p);
    for (int i = 0; i < stages; ++i, stage.advance(p.stages)) {
      if (turn-- > 0) continue;
      turn = kFillers - 1;
      wait_barrier(&empty[stage.index], stage.parity ^ 1);
      fill_stage(p, unit, i * (kStageBytes / p.box_bytes), ring + stage.index * kStageBytes,
                 &full[stage.index], policy);
    }
  }
}

// A warp: adds up its words of all that comes.
__device__ void add_up(const Params& p, const unsigned char* ring, Barrier* full, Barrier* empty) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  Stage stage;
  for (int wave = 0; wave < p.waves; ++wave) {
    const Unit unit(p, wave, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const int stages = unit.stages(p);
    uint32_t sum = 0;
    for (int i = 0; i < stages; ++i) {
      wait_barrier(&full[stage.index], stage.parity);
      const uint4* words = reinterpret_cast<const uint4*>(ring + stage.index * kStageBytes);
#pragma unroll
      for (int j = 0; j < kStageBytes / 16 / (kWarps * kWarpSize); ++j) {
        const uint4 v = words[j * kWarps * kWarpSize + threadIdx.x];
        sum += v.x + v.y + v.z + v.w;
      }
      __syncwarp();
      if (lane == 0) arrive(&empty[stage.index], sum & p.zero);
      stage.advance(p.stages);
    }
    for (int way = kWarpSize / 2; way > 0; way /= 2) sum += __shfl_xor_sync(~0u, sum, way);
    if (lane == 0) p.sums[unit.number * kWarps + warp] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 2) stream(const __grid_constant__ Params p) {
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
    fill(p, ring, full, empty, threadIdx.x / kWarpSize - kWarps);
  }
}

// --- host ----------------------------------------------------------------------------------------

struct Shape {
  const char* name;
  int n, k, parts;

  int columns(int part) const {  // in whole chunks
    const int first = static_cast<int>(ceil_div(k / kChunk, parts)) * kChunk;
    return part == 0 ? first : k - first;
  }
  int pass_rows() const {  // for few tokens
    const int64_t half_tiles = ceil_div(n / 8, sms() / parts), tiles = ceil_div(half_tiles, 2);
    return static_cast<int>(ceil_div(tiles, ceil_div(tiles, kPassTiles))) * kTileRows;
  }
};

constexpr Shape kShapes[] = {
    {"qwen3-0.6b qkv", 4096, 1024, 1},        {"qwen3-0.6b o", 1024, 2048, 2},
    {"qwen3-0.6b gate_up", 6144, 1024, 1},    {"qwen3-0.6b down", 1024, 3072, 2},
    {"llama-3.2-1b qkv", 3072, 2048, 1},      {"llama-3.2-1b o", 2048, 2048, 2},
    {"llama-3.2-1b gate_up", 16384, 2048, 1}, {"llama-3.2-1b down", 2048, 8192, 2},
    {"qwen3-4b qkv", 6144, 2560, 1},          {"qwen3-4b o", 2560, 4096, 2},
    {"qwen3-4b gate_up", 19456, 2560, 1},     {"qwen3-4b down", 2560, 9728, 2},
    {"qwen3-8b qkv", 6144, 4096, 1},          {"qwen3-8b o", 4096, 4096, 2},
    {"qwen3-8b gate_up", 24576, 4096, 1},     {"qwen3-8b down", 4096, 12288, 2},
};

constexpr struct Ring {
  int stages, ctas;  // ctas: an SM
} kRings[] = {{3, 2}, {6, 2}, {6, 1}, {12, 1}};
static_assert(kRings[0].stages >= kFillers, "a filler that is ahead would take phase n for n + 2");
constexpr int kNarrowRing = 1, kWideRing = 3;  // of the rule

// Copies see the columns of a part as [some][width], and bring 64 columns of some slices and rows.
constexpr struct Boxes {
  const char* name;
  bool is_narrow;           // for few tokens
  int rows, slices, width;  // width 0: an eighth of the columns
} kBoxes[] = {
    {"today_narrow", true, 8, 8, kSlice}, {"b_narrow", true, 8, 8, 0},
    {"today_wide", false, 8, 2, kSlice},  {"a", false, 64, 1, kChunk},
    {"a_8_rows", false, 8, 1, kChunk},    {"b_wide", false, 64, 1, kSlice},
};
enum : int { kTodayNarrow, kBNarrow, kTodayWide, kA, kAOf8Rows, kBWide, kBoxesCount };

struct Pool {
  std::vector<uint32_t> host;
  unsigned char* device = nullptr;
  uint32_t* sums = nullptr;

  Pool() : host(kPoolBytes / 4) {
    uint32_t word = 1;
    for (uint32_t& to : host) {
      word = word * 1664525u + 1013904223u;
      to = word ^ word >> 15;
    }
    CHECK(cudaMalloc(&device, kPoolBytes));
    CHECK(cudaMalloc(&sums, kPoolBytes / kStageBytes * kWarps * sizeof(uint32_t)));
    CHECK(cudaMemcpy(device, host.data(), kPoolBytes, cudaMemcpyHostToDevice));
  }

  // Of a part, the sums of each row's words.
  std::vector<uint32_t> row_sums(const Shape& shape, int part) const {
    const size_t words = shape.k / 2, first = part * shape.columns(0) / 2;
    std::vector<uint32_t> of_rows(host.size() / words);
    for (size_t row = 0; row < of_rows.size(); ++row) {
      const uint32_t* from = &host[row * words + first];
      for (int i = 0; i < shape.columns(part) / 2; ++i) of_rows[row] += from[i];
    }
    return of_rows;
  }
};

// One way to read a shape's weights, and how long its turns took.
struct Way {
  Shape shape;
  int boxes, ring;  // in kBoxes, kRings
  bool fetches_256;
  int ctas, rows;
  Params p = {};
  std::vector<float> ms;

  Way(const Pool& pool, const Shape& shape, int boxes, int ring, bool fetches_256)
      : shape(shape), boxes(boxes), ring(ring), fetches_256(fetches_256) {
    ctas = sms() * kRings[ring].ctas / shape.parts * shape.parts;
    rows = kBoxes[boxes].is_narrow ? shape.pass_rows() : kWideRows;
    p.sums = pool.sums;
    p.stages = kRings[ring].stages;
    p.parts = shape.parts;
    p.rows = rows;
    p.box_rows = kBoxes[boxes].rows;
    p.box_slices = kBoxes[boxes].slices;
    p.box_bytes = p.box_rows * p.box_slices * kSlice * 2;
    p.keeps = fetches_256;
    p.waves = static_cast<int>(kPoolBytes / 2 / shape.k / (ctas / shape.parts * rows)) / 2 * 2;
    for (int part = 0; part < shape.parts; ++part) make_map(pool, part);
  }

  int units() const { return p.waves * ctas; }
  double gb_per_s() const {
    std::vector<float> sorted(ms.begin() + 1, ms.end());  // the first warms up
    std::sort(sorted.begin(), sorted.end());
    return 2e-6 * kLaunches * units() / p.parts * rows * shape.k / sorted[sorted.size() / 2];
  }

  void take_turn(cudaEvent_t begin, cudaEvent_t end) {
    LaunchShape launch_shape{ctas, kThreads};
    launch_shape.shared_bytes = p.stages * kStageBytes + 2 * kMaxStages * sizeof(Barrier);
    CHECK(cudaMemset(p.sums, 0xff, units() * kWarps * sizeof(uint32_t)));
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < kLaunches; ++i)
      CHECK(static_cast<cudaError_t>(launch(stream, launch_shape, nullptr, p)));
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    ms.push_back(0);
    CHECK(cudaEventElapsedTime(&ms.back(), begin, end));
  }

  // `expected`: [part][row].
  void check(const std::vector<uint32_t> (&expected)[2]) const {
    std::vector<uint32_t> found(units() * kWarps);
    CHECK(cudaMemcpy(found.data(), p.sums, found.size() * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < units(); ++i) {
      const Unit unit(p, i / ctas, i % ctas, ctas);
      uint32_t rest = 0;
      for (int warp = 0; warp < kWarps; ++warp) rest += found[i * kWarps + warp];
      for (int row = 0; row < rows; ++row) rest -= expected[unit.part][unit.row + row];
      if (rest == 0) continue;
      std::fprintf(stderr, "%s, %s: the sum of rows %d .. + %d of part %d is not the host's\n",
                   shape.name, kBoxes[boxes].name, unit.row, rows - 1, unit.part);
      std::exit(1);
    }
  }

 private:
  void make_map(const Pool& pool, int part) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                           cudaEnableDefault, &found));
    const int columns = shape.columns(part),
              width = kBoxes[boxes].width > 0 ? kBoxes[boxes].width : columns / kSlices;
    p.columns[part] = columns;
    p.some[part] = columns / width;
    const cuuint64_t row_bytes = shape.k * 2,
                     sizes[] = {cuuint64_t(width), kPoolBytes / row_bytes,
                                cuuint64_t(columns / width)},
                     strides[] = {row_bytes, cuuint64_t(width) * 2};
    const cuuint32_t box[] = {kSlice, cuuint32_t(p.box_rows), cuuint32_t(p.box_slices)},
                     steps[] = {1, 1, 1};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &p.weight[part], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
        pool.device + part * shape.columns(0) * 2, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        fetches_256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return;
    std::fprintf(stderr, "%s, %s: the driver refuses the map: error %d\n", shape.name,
                 kBoxes[boxes].name, static_cast<int>(result));
    std::exit(1);
  }
};

// The geometric mean over the shapes.
struct Mean {
  double logs = 0;
  int count = 0;

  void add(double value) {
    logs += std::log(value);
    ++count;
  }
  double value() const { return std::exp(logs / count); }
};

using Means = Mean[kBoxesCount][std::size(kRings)][2];  // by boxes, ring and fetch

void print(const char* shape, int k, int boxes, int ring, int rows, bool fetches_256, double gb) {
  std::printf(
      "{\"shape\": \"%s\", \"k\": %d, \"boxes\": \"%s\", \"ring_kib\": %d, \"ctas\": %d, "
      "\"rows\": %d, \"fetch\": %d, \"gb_per_s\": %.0f}\n",
      shape, k, kBoxes[boxes].name, kRings[ring].stages * kStageBytes / 1024, kRings[ring].ctas,
      rows, fetches_256 ? 256 : 128, gb);
}

// body(boxes, whether L2 fetches 256 bytes) for each way with a ring.
template <typename Body>
void for_ways(const Body& body) {
  for (int boxes = 0; boxes < kBoxesCount; ++boxes) {
    for (const bool fetches_256 : {false, true}) body(boxes, fetches_256);
  }
}

void measure(const Pool& pool, const Shape& shape, int ring,
             const std::vector<uint32_t> (&expected)[2], Means& means) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<Way> ways;
  for_ways([&](int boxes, bool fetches_256) {
    ways.emplace_back(pool, shape, boxes, ring, fetches_256);
  });
  for (int i = 0; i <= kTurns; ++i) {
    for (Way& way : ways) {
      way.take_turn(begin, end);
      if (i % kTurns == 0) way.check(expected);
    }
  }
  for (const Way& way : ways) {
    print(shape.name, shape.k, way.boxes, ring, way.rows, way.fetches_256, way.gb_per_s());
    means[way.boxes][ring][way.fetches_256].add(way.gb_per_s());
  }
  std::fflush(stdout);
}

void print_rule(const Means& means) {
  const auto best = [&](int boxes) {
    const auto& by_fetch = means[boxes][kBoxes[boxes].is_narrow ? kNarrowRing : kWideRing];
    return std::max(by_fetch[0].value(), by_fetch[1].value());
  };
  const double a = std::max(best(kA), best(kAOf8Rows)) / best(kTodayWide),
               b_wide = best(kBWide) / best(kTodayWide),
               b_narrow = best(kBNarrow) / best(kTodayNarrow);
  const char* rule = a >= 0.95                            ? "A"
                     : b_narrow >= 0.99 && b_wide >= 0.99 ? "B"
                     : a >= 0.85                          ? "A beyond 32 tokens"
                     : a >= 0.60                          ? "A beyond 200 tokens"
                                                          : "stay";
  std::printf("{\"a\": %.3f, \"b_wide\": %.3f, \"b_narrow\": %.3f, \"rule\": \"%s\"}\n", a, b_wide,
              b_narrow, rule);
}

}  // namespace

int main() {
  constexpr int kRingsCount = static_cast<int>(std::size(kRings));
  const Pool pool;
  Means means;
  for (const Shape& shape : kShapes) {
    std::vector<uint32_t> expected[2];
    for (int part = 0; part < shape.parts; ++part) expected[part] = pool.row_sums(shape, part);
    for (int ring = 0; ring < kRingsCount; ++ring) measure(pool, shape, ring, expected, means);
  }
  for (int ring = 0; ring < kRingsCount; ++ring) {
    for_ways([&](int boxes, bool fetches_256) {
      print("mean", 0, boxes, ring, 0, fetches_256, means[boxes][ring][fetches_256].value());
    });
  }
  print_rule(means);
}
