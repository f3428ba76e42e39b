// Small kernels that the emulator is tested with: what the Hopper kernels are made of, right and
// with planted bugs. Plain CUDA.
#include <cuda.h>

#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/row_tile_map.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace photon::cuda {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAll = 0xffffffffu;

enum Bug : int {
  kNoBug = 0,
  kMissingBarrier,
  kUseBeforeLanding,
  kOverwriteInUse,
  kMissingArrival,
  kMissingFence,
  kTooManyBytes,
  kTooManyArrivals,
  kNeverAwaited,
  kUninitialized,
  kEndsTooEarly,
  kNeverEnters,
  kNeverMeets,
  kEntersTwice,
  kWrongRank,
  kNeverWaits,
  kThreadNeverWaits,
  kBlockNeverWaits,
  kWritesTooEarly,
  kReadsTooEarly,
  kCopiesTooEarly,
  kReadsTheFirstTooEarly,
};

// When a kernel of a chain lets the next one start.
enum LetsNext : int { kNever = 0, kBeforeItWaits, kAfterItHasWaited };

// --- warps ---------------------------------------------------------------------------------------

// out[i][lane], one line per operation.
__global__ void shuffle_kernel(float* out) {
  const int lane = threadIdx.x;
  const float v = 1.5f * lane;
  int i = 0;
  const auto put = [&](float result) { out[i++ * kWarpSize + lane] = result; };
  put(__shfl_sync(kAll, v, lane * 7 % kWarpSize));
  put(__shfl_sync(kAll, v, 3, 8));
  put(__shfl_up_sync(kAll, v, 3));
  put(__shfl_up_sync(kAll, v, 3, 16));
  put(__shfl_down_sync(kAll, v, 5));
  put(__shfl_down_sync(kAll, v, 5, 8));
  put(__shfl_xor_sync(kAll, v, 9));
  put(__shfl_xor_sync(kAll, v, 9, 4));
  put(static_cast<float>(__shfl_xor_sync(kAll, static_cast<double>(v), 1)));
  if (lane % 16 < 8) {  // two masks at once
    const unsigned mask = lane < 16 ? 0x000000ffu : 0x00ff0000u;
    put(__shfl_xor_sync(mask, v, 2));
    put(static_cast<float>(__ballot_sync(mask, lane % 3 == 0)));
  } else {
    put(-1.0f);
    put(-1.0f);
  }
  put(static_cast<float>(__any_sync(kAll, lane == 17)));
  put(static_cast<float>(__all_sync(kAll, lane != 17)));
  put(static_cast<float>(__reduce_add_sync(kAll, lane)));
  put(static_cast<float>(__reduce_max_sync(kAll, lane - 40)));
}

// Lanes of a warp that part at `how`: 0: not at all, 1: some have ended, 2: two calls for one, 3: a
// mask that does not name the caller, 4: a read from a lane outside of the mask.
__global__ void divergent_kernel(int* out, int how) {
  const int lane = threadIdx.x;
  if (how == 1 && lane == 5) return;
  int value = lane;
  if (how == 2 && lane >= 16) {
    value = __shfl_xor_sync(kAll, value, 1);
  } else if (how == 3) {
    value = __shfl_sync(0x7fffffffu, value, 0);
  } else if (how == 4) {
    if (lane < 4) value = __shfl_sync(0xfu, value, 4);
  } else {
    value = __shfl_xor_sync(kAll, value, 1);
  }
  out[lane] = value;
}

// --- blocks --------------------------------------------------------------------------------------

// Passes values around the block, round after round, through one buffer: both barriers of a round
// are needed.
__global__ void rotate_kernel(int* out, int rounds, int bug) {
  __shared__ int buffer[kThreads];
  const int t = threadIdx.x;
  int value = t + blockIdx.x * kThreads;
  for (int round = 0; round < rounds; ++round) {
    buffer[t] = value;
    __syncthreads();
    value = buffer[(t + 33) % kThreads];
    if (bug != kMissingBarrier) __syncthreads();
  }
  out[blockIdx.x * kThreads + t] = value;
}

// The first 32 threads wait for barrier 1 alone, the others as well where they should not, or
// elsewhere, or they end.
__global__ void barrier_kernel(int* out, int first_number, int first_count, int other_number,
                               int other_count) {
  const bool first = threadIdx.x < kWarpSize;
  const int number = first ? first_number : other_number, count = first ? first_count : other_count;
  if (count > 0) sync_threads(number, count);
  out[threadIdx.x] = number;
}

__global__ void unfinished_barrier_kernel(int* out) {
  if (threadIdx.x < kWarpSize) __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void static_shared_kernel(float* out) {
  __shared__ float left_over[kThreads];
  out[blockIdx.x * kThreads + threadIdx.x] = left_over[threadIdx.x];
  left_over[threadIdx.x] = 1.0f;
}

__global__ void dynamic_shared_kernel(float* out, int writes) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  out[threadIdx.x] = shared[threadIdx.x];
  if (threadIdx.x == 0) shared[writes] = 1.0f;
}

// The sum of all blocks' numbers by the block that is last to come.
__global__ void last_block_kernel(float* out, float* partial, unsigned* counter) {
  __shared__ unsigned before;
  if (threadIdx.x == 1) partial[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
  __syncthreads();
  if (threadIdx.x == 0) before = count_round(counter, gridDim.x - 1);
  __syncthreads();
  if (before != gridDim.x - 1 || threadIdx.x != kWarpSize - 1) return;
  float sum = 0.0f;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
  *out = sum;
}

// Every third vector of `in`, zeros else, of which there is nothing to read.
__global__ void fresh_kernel(uint4* out, const uint4* in) {
  const int i = computed_now(static_cast<int>(threadIdx.x));
  out[i] = load_fresh_if(i % 3 == 0, i % 3 == 0 ? computed_now(in + i) : nullptr);
}

// --- copies --------------------------------------------------------------------------------------

constexpr int kStages = 3, kTileFloats = 64;
constexpr uint32_t kTileBytes = kTileFloats * sizeof(float);

struct Ring {
  alignas(128) float tiles[kStages][kTileFloats];
  Barrier full[kStages], empty[kStages];
};

// A tensor of float32: sizes and boxes from the innermost dimension on, strides in bytes.
struct Shape {
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3];
  bool swizzled;
};

int make_map(CUtensorMap& map, const float* tensor, const Shape& shape) {
  const cuuint32_t steps[] = {1, 1, 1};
  return cuTensorMapEncodeTiled(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, const_cast<float*>(tensor), shape.sizes,
      shape.strides, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A tile is a row of the tensor.
int make_tiles_map(CUtensorMap& map, const float* in, int tiles) {
  const auto count = static_cast<cuuint64_t>(tiles);
  return make_map(
      map, in,
      {{kTileFloats, count, 1}, {kTileBytes, count * kTileBytes}, {kTileFloats, 1, 1}, false});
}

// One producer warp, two consumer warps: out[i] = sum over the tiles of in[tile][i].
__global__ void ring_kernel(float* out, const __grid_constant__ CUtensorMap in, int tiles,
                            int bug) {
  Ring& ring = *reinterpret_cast<Ring*>(dynamic_shared());
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0 && bug != kUninitialized) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&ring.full[i], bug == kTooManyArrivals ? 2 : 1);
      init_barrier(&ring.empty[i], 2 * kWarpSize);
    }
    if (bug != kMissingFence) fence_barriers();
  }
  __syncthreads();
  if (warp == 2) {
    if (threadIdx.x % kWarpSize != 0) return;
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages, round = tile / kStages;
      if (bug != kOverwriteInUse) wait_barrier(&ring.empty[stage], (round & 1) ^ 1);
      arrive_expecting(&ring.full[stage], bug == kTooManyBytes ? kTileBytes + 16 : kTileBytes);
      tensor_copy(ring.tiles[stage], &in, {0, tile, 0}, &ring.full[stage], evict_first());
      if (bug == kTooManyArrivals) {
        for (int i = 0; i < 3; ++i) arrive(&ring.full[stage]);
      }
    }
    return;
  }
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages;
    if (bug != kUseBeforeLanding && (bug != kNeverAwaited || tile + 1 < tiles))
      wait_barrier(&ring.full[stage], round & 1);
    sum += ring.tiles[stage][threadIdx.x];
    if (bug != kMissingArrival) arrive(&ring.empty[stage]);
  }
  out[threadIdx.x] = sum;
}

// Four warps read every tile and request by turns, one stage behind: out[i] = sum over the tiles of
// in[tile][i % kTileFloats].
__global__ void turns_kernel(float* out, const __grid_constant__ CUtensorMap in, int tiles,
                             int bug) {
  Ring& ring = *reinterpret_cast<Ring*>(dynamic_shared());
  const int warp = threadIdx.x / kWarpSize, warps = kThreads / kWarpSize;
  const bool is_first = threadIdx.x % kWarpSize == 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&ring.full[i], 1);
      init_barrier(&ring.empty[i], warps);
    }
    fence_barriers();
  }
  __syncthreads();
  const auto request = [&](int tile) {
    const int stage = tile % kStages, round = tile / kStages;
    if (tile >= tiles || tile % warps != warp || !is_first) return;
    if (bug != kOverwriteInUse) wait_barrier(&ring.empty[stage], (round & 1) ^ 1);
    arrive_expecting(&ring.full[stage], kTileBytes);
    tensor_copy(ring.tiles[stage], &in, {0, tile, 0}, &ring.full[stage], evict_first());
  };
  for (int tile = 0; tile + 1 < kStages; ++tile) request(tile);
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages;
    wait_barrier(&ring.full[stage], round & 1);
    sum += ring.tiles[stage][threadIdx.x % kTileFloats];
    __syncwarp();
    if (is_first) arrive(&ring.empty[stage]);
    request(tile + kStages - 1);
  }
  out[threadIdx.x] = sum;
}

// What kBoxBytes of shared memory hold when a copy of `bytes` bytes to `shift` has landed.
constexpr int kBoxBytes = 16 * 1024;

template <typename Copy>
__device__ void show_copy(uint32_t* out, int bytes, int bug, const Copy& copy) {
  unsigned char* shared = dynamic_shared();
  Barrier* barrier = reinterpret_cast<Barrier*>(shared + kBoxBytes);
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(barrier, bytes);
    copy(shared, barrier);
  }
  if (bug != kUseBeforeLanding && bug != kNeverAwaited) wait_barrier(barrier, 0);
  for (int i = threadIdx.x; i < kBoxBytes / 4; i += kThreads)
    out[i] = reinterpret_cast<uint32_t*>(shared)[i];
  if (bug == kUseBeforeLanding) wait_barrier(barrier, 0);
}

__global__ void box_kernel(uint32_t* out, const __grid_constant__ CUtensorMap in, TensorPlace place,
                           int bytes, int shift, int bug) {
  show_copy(out, bytes, bug, [&](unsigned char* shared, Barrier* barrier) {
    if (bug != kUninitialized) prefetch_tensor_map(&in);
    tensor_copy(shared + shift, &in, place, barrier, evict_first());
  });
}

constexpr int kMapBlocks = 8;

__global__ void row_tile_kernel(uint32_t* out, const __grid_constant__ RowTileMap weight, int row,
                                int block) {
  show_copy(out, kMapBlocks * kKBlockBytes, kNoBug, [&](unsigned char* shared, Barrier* barrier) {
    prefetch_row_tile_map(weight);
    copy_row_tile(shared + 1024, weight, row, block, barrier, evict_first());
  });
}

// out[i] = sum over the tiles of in[tile][i], by one warp that keeps one group under way; invalid
// copies bring zeros.
__global__ void async_kernel(float* out, const float* in, int tiles, int valid_tiles, int bug) {
  float (&buffer)[2][kTileFloats * 2] =
      *reinterpret_cast<float (*)[2][kTileFloats * 2]>(dynamic_shared());
  const int lane = threadIdx.x;
  const auto start = [&](int tile) {
    const float* source = in + (tile < valid_tiles ? tile : 0) * kTileFloats * 2;
    if (tile < tiles)
      async_copy16(buffer[tile % 2] + lane * 4, source + lane * 4, tile < valid_tiles);
    commit_copies();
  };
  float sums[4] = {};
  start(0);
  for (int tile = 0; tile < tiles; ++tile) {
    start(tile + 1);
    if (bug == kUseBeforeLanding) {
      wait_copies<2>();
    } else {
      wait_copies<1>();
    }
    if (bug != kMissingBarrier) __syncwarp();
    for (int i = 0; i < 4; ++i) sums[i] += buffer[tile % 2][i * kWarpSize + (lane ^ 1)];
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i) out[i * kWarpSize + (lane ^ 1)] = sums[i];
}

// --- matrices ------------------------------------------------------------------------------------

// d[16][8] += a[16][16] b[16][8]; the fragments come from global memory (`way` 0), or by
// load_matrices, b as [8][16] (1) or [16][8] (2); of bfloat16, or of float16.
__global__ void matrix_kernel(float* d, const uint16_t* a, const uint16_t* b, int way, int is_f16) {
  uint16_t* shared_a = reinterpret_cast<uint16_t*>(dynamic_shared());
  uint16_t* shared_b = shared_a + 16 * 16;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
  const auto pair = [](uint16_t low, uint16_t high) {
    return static_cast<uint32_t>(high) << 16 | low;
  };
  float sums[4];
  uint32_t left[4], right[2], loaded[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + t + i % 2];
  for (int i = lane; i < 16 * 16; i += kWarpSize) shared_a[i] = a[i];
  for (int i = lane; i < 16 * 8; i += kWarpSize) shared_b[way == 1 ? i % 8 * 16 + i / 8 : i] = b[i];
  __syncwarp();
  if (way == 0) {
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, column = t + i / 2 * 8;
      left[i] = pair(a[row * 16 + column], a[row * 16 + column + 1]);
    }
    for (int i = 0; i < 2; ++i) right[i] = pair(b[(t + i * 8) * 8 + g], b[(t + i * 8 + 1) * 8 + g]);
  } else {
    load_matrices(left, shared_a + lane % 16 * 16 + lane / 16 * 8);
    if (way == 1) {
      load_matrices(loaded, shared_b + lane % 8 * 16 + lane / 8 % 2 * 8);
    } else {
      load_matrices_transposed(loaded, shared_b + lane % 16 * 8);
    }
    right[0] = loaded[0];
    right[1] = loaded[1];
  }
  if (is_f16 != 0) {
    multiply_f16(sums, left, right);
  } else {
    multiply_bf16(sums, left, right);
  }
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t + i % 2] = sums[i];
}

// Four e4m3 numbers a thread as float16.
__global__ void e4m3_kernel(uint32_t* halves, const uint32_t* codes) {
  uint32_t pairs[2];
  halves_of_e4m3(pairs, codes[threadIdx.x]);
  for (int i = 0; i < 2; ++i) halves[2 * threadIdx.x + i] = pairs[i];
}

// --- clusters ------------------------------------------------------------------------------------

// Every block gets from every block of its cluster that one's number, and writes the sum of (rank +
// 1) * number.
__global__ void cluster_kernel(float* out, int size, int bug) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  if (bug != kNeverMeets) sync_cluster();
  if (threadIdx.x < static_cast<unsigned>(size)) {
    store_in_block(shared + cluster_rank(), threadIdx.x, static_cast<float>(blockIdx.x));
  }
  if (bug == kEndsTooEarly && cluster_rank() == 0) return;
  if (bug != kMissingBarrier) sync_cluster();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int i = 0; i < size; ++i) sum += static_cast<float>(i + 1) * shared[i];
  out[blockIdx.x] = sum;
}

// Every block shows what the next one of its cluster has: 32 lanes with four values each, then 32
// with two.
__global__ void next_block_kernel(float* out, int size, int bug) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  const int t = threadIdx.x, rank = static_cast<int>(cluster_rank());
  const unsigned next = bug == kWrongRank ? size : (rank + 1) % size;
  for (int i = t; i < 6 * kWarpSize; i += kWarpSize)
    shared[i] = static_cast<float>(1000 * rank + i);
  if (bug != kMissingBarrier) sync_cluster();
  const float4 four = load_from_block(reinterpret_cast<const float4*>(shared) + t, next);
  const float2 two =
      load_from_block(reinterpret_cast<const float2*>(shared + 4 * kWarpSize) + t, next);
  if (bug == kEndsTooEarly && rank == 0) return;
  if (bug != kNeverMeets) sync_cluster();  // the block before this one has read it
  float* own = out + blockIdx.x * 6 * kWarpSize;
  const float shown[6] = {four.x, four.y, four.z, four.w, two.x, two.y};
  for (int i = 0; i < 6; ++i) own[i < 4 ? 4 * t + i : 4 * kWarpSize + 2 * t + i - 4] = shown[i];
}

// All threads count before they enter, and see the whole cluster's count when they have met: round
// after round, the other barrier between.
__global__ void halves_kernel(int* out, int* counters, int size, int rounds, int bug) {
  const bool is_odd = cluster_rank() == 1 && bug != kNoBug;
  int* counter = counters + blockIdx.x / static_cast<unsigned>(size);
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    atomicAdd(counter, 1);
    if (round % 2 == 1) {
      leave_cluster();
    } else if (!is_odd || bug != kNeverEnters) {
      enter_cluster();
    }
    if (is_odd && bug == kEntersTwice) enter_cluster();
    if (is_odd && bug == kEndsTooEarly) return;
    if (!is_odd || bug != kNeverMeets) meet_cluster();
    sum += *counter;
    sync_cluster();
  }
  out[blockIdx.x * kWarpSize + threadIdx.x] = sum;
}

// Half of a warp enters the cluster's barrier elsewhere than the other half.
__global__ void parted_cluster_kernel() {
  if (threadIdx.x < kWarpSize / 2) {
    enter_cluster();
  } else {
    enter_cluster();
  }
  meet_cluster();
}

// A ring whose tiles all blocks of a cluster read: the first two copy half of every tile each, for
// all of them. out[block][i] = sum over the tiles of in[tile][i].
__global__ void shared_ring_kernel(float* out, const __grid_constant__ CUtensorMap in, int tiles,
                                   int size, int bug) {
  Ring& ring = *reinterpret_cast<Ring*>(dynamic_shared());
  const int warps = 2, half = kTileFloats / 2, rank = static_cast<int>(cluster_rank());
  const bool is_first = threadIdx.x % kWarpSize == 0;
  if (threadIdx.x == 0 && (bug != kUninitialized || rank != 1)) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&ring.full[i], 1);
      init_barrier(&ring.empty[i], warps * size);
    }
    if (bug != kMissingFence || rank != 1) fence_barriers();
  }
  __syncthreads();
  enter_cluster();
  if (bug != kNeverMeets || rank != 0) meet_cluster();
  const auto request = [&](int tile) {
    const int stage = tile % kStages, round = tile / kStages;
    if (tile >= tiles || threadIdx.x > 0) return;
    if (bug != kOverwriteInUse) wait_barrier(&ring.empty[stage], (round & 1) ^ 1);
    arrive_expecting(&ring.full[stage], kTileBytes);
    if (rank > 1) return;
    const unsigned ranks = bug == kWrongRank ? 2u << size : (1u << size) - 1;
    tensor_copy_to(static_cast<uint16_t>(ranks), ring.tiles[stage] + rank * half, &in,
                   {rank * half, tile, 0}, &ring.full[stage], evict_last());
  };
  for (int tile = 0; tile + 1 < kStages; ++tile) request(tile);
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages;
    wait_barrier(&ring.full[stage], round & 1);
    sum += ring.tiles[stage][threadIdx.x];
    __syncwarp();
    if (bug == kMissingArrival) {
      if (is_first) arrive(&ring.empty[stage]);
    } else if (static_cast<int>(threadIdx.x % kWarpSize) < size) {
      arrive_in_block(&ring.empty[stage], threadIdx.x % kWarpSize, 0);
    }
    request(tile + kStages - 1);
  }
  if (bug != kEndsTooEarly) leave_cluster();
  out[blockIdx.x * kTileFloats + threadIdx.x] = sum;
  if (bug != kEndsTooEarly) meet_cluster();
}

// Of a cluster of two, the second block sends the first two values a thread, which are announced
// when all have been sent.
__global__ void send_kernel(float* out, int bug) {
  float* values = reinterpret_cast<float*>(dynamic_shared());
  Barrier* sent = reinterpret_cast<Barrier*>(values + 2 * kThreads);
  Barrier* arrived = sent + 1;
  const int t = threadIdx.x;
  if (t == 0 && bug != kUninitialized) {
    init_barrier(sent, kThreads);
    init_barrier(arrived, 1);
    if (bug != kMissingFence) fence_barriers();
  }
  __syncthreads();
  enter_cluster();
  meet_cluster();
  if (cluster_rank() == 1) {
    send_to_block(values + 2 * t, bug == kWrongRank ? 2 : 0, 1.0f + 2 * t, 2.0f + 2 * t, arrived);
    return arrive_in_block(sent, 0, 0);
  }
  if (bug == kEndsTooEarly) return;
  if (t == 0) {
    wait_barrier(sent, 0);
    arrive_expecting(arrived, (bug == kTooManyBytes ? kThreads + 1 : kThreads) * 8);
  }
  if (bug == kNeverAwaited) return;
  if (bug != kUseBeforeLanding) wait_barrier(arrived, 0);
  out[2 * t] = values[2 * t];
  out[2 * t + 1] = values[2 * t + 1];
  if (bug == kUseBeforeLanding) wait_barrier(arrived, 0);
}

// --- launches and types --------------------------------------------------------------------------

__global__ void pdl_kernel(int* out, int bug) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  let_next_start();
  if (bug == kNeverWaits || (bug == kThreadNeverWaits && i == 5) ||
      (bug == kBlockNeverWaits && blockIdx.x == 1))
    return;
  if (bug == kWritesTooEarly) out[i] = 1;
  wait_for_earlier();
  out[i] = 1;
}

// A chain: the second kernel adds one to what the first has written, the third sums both up.
__global__ void first_of_chain(int* first) {
  let_next_start();
  first[threadIdx.x] = threadIdx.x;
}

__global__ void second_of_chain(int* second, const int* first, int lets_next) {
  if (lets_next == kBeforeItWaits) let_next_start();
  wait_for_earlier();
  if (lets_next == kAfterItHasWaited) let_next_start();
  second[threadIdx.x] = first[threadIdx.x] + 1;
}

__global__ void third_of_chain(int* out, const int* second, const int* first, const int* constant,
                               int bug) {
  const int i = threadIdx.x;
  int* const place = reinterpret_cast<int*>(dynamic_shared()) + 4 * i;
  int sum = constant[i];  // what no kernel writes may be read before
  if (bug == kReadsTooEarly) sum += second[i];
  if (bug == kReadsTheFirstTooEarly) sum += first[i];
  if (bug == kCopiesTooEarly) async_copy16(place, second + i / 4 * 4, true);
  commit_copies();
  wait_copies<0>();
  wait_for_earlier();
  if (bug == kCopiesTooEarly) sum += place[i % 4];
  if (bug != kReadsTooEarly && bug != kCopiesTooEarly) sum += second[i];
  if (bug != kReadsTheFirstTooEarly) sum += first[i];
  out[i] = sum;
}

__global__ void convert_kernel(const float* in, float* bf16, float* f16, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  bf16[i] = __bfloat162float(__float2bfloat16_rn(in[i]));
  f16[i] = __half2float(__float2half_rn(in[i]));
}

__global__ void fill_kernel(int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<int>(blockIdx.x);
}

}  // namespace

EXPORT const char* message(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

EXPORT int shuffle(float* out) { return launch(shuffle_kernel, 1, kWarpSize, nullptr, out); }
EXPORT int divergent(int* out, int how) {
  return launch(divergent_kernel, 1, kWarpSize, nullptr, out, how);
}
EXPORT int rotate(int* out, int blocks, int rounds, int bug) {
  return launch(rotate_kernel, blocks, kThreads, nullptr, out, rounds, bug);
}
EXPORT int barrier(int* out, int first_number, int first_count, int other_number, int other_count) {
  return launch(barrier_kernel, 1, 2 * kWarpSize, nullptr, out, first_number, first_count,
                other_number, other_count);
}
EXPORT int unfinished_barrier(int* out) {
  return launch(unfinished_barrier_kernel, 1, kThreads, nullptr, out);
}
EXPORT int static_shared(float* out, int blocks) {
  return launch(static_shared_kernel, blocks, kThreads, nullptr, out);
}
EXPORT int dynamic_shared_context(float* out, int writes) {
  return launch(dynamic_shared_kernel, LaunchShape{1, kThreads, kThreads * sizeof(float)}, nullptr,
                out, writes);
}
EXPORT int last_block(float* out, float* partial, unsigned* counter, int blocks) {
  return launch(last_block_kernel, blocks, kWarpSize, nullptr, out, partial, counter);
}
EXPORT int fresh(uint4* out, const uint4* in) {
  return launch(fresh_kernel, 1, kWarpSize, nullptr, out, in);
}
EXPORT int ring(float* out, const float* in, int tiles, int bug) {
  CUtensorMap map;
  if (const int error = make_tiles_map(map, in, tiles)) return error;
  return launch(ring_kernel, LaunchShape{1, 3 * kWarpSize, sizeof(Ring)}, nullptr, out, map, tiles,
                bug);
}
EXPORT int turns(float* out, const float* in, int tiles, int bug) {
  CUtensorMap map;
  if (const int error = make_tiles_map(map, in, tiles)) return error;
  return launch(turns_kernel, LaunchShape{1, kThreads, sizeof(Ring)}, nullptr, out, map, tiles,
                bug);
}
// `numbers`: sizes, strides, box, place, and whether it is swizzled.
EXPORT int box(uint32_t* out, const float* in, const int64_t* numbers, int shift, int bug) {
  Shape shape = {};
  for (int i = 0; i < 3; ++i) {
    shape.sizes[i] = static_cast<cuuint64_t>(numbers[i]);
    if (i < 2) shape.strides[i] = static_cast<cuuint64_t>(numbers[3 + i]);
    shape.box[i] = static_cast<cuuint32_t>(numbers[5 + i]);
  }
  shape.swizzled = numbers[11] != 0;
  const TensorPlace place = {static_cast<int>(numbers[8]), static_cast<int>(numbers[9]),
                             static_cast<int>(numbers[10])};
  const auto bytes = static_cast<int>(4 * shape.box[0] * shape.box[1] * shape.box[2]);
  CUtensorMap map = {};
  if (bug != kUninitialized) {
    if (const int error = make_map(map, in, shape)) return error;
  }
  return launch(box_kernel, LaunchShape{1, kThreads, kBoxBytes + sizeof(Barrier)}, nullptr, out,
                map, place, bytes, shift, bug);
}
EXPORT int row_tile(uint32_t* out, const void* weight, int64_t rows, int64_t k, int64_t stride,
                    int row, int block) {
  RowTileMap map;
  if (const int error = make_row_tile_map(map, kMapBlocks, weight, rows, k, stride)) return error;
  return launch(row_tile_kernel, LaunchShape{1, kThreads, kBoxBytes + sizeof(Barrier)}, nullptr,
                out, map, row, block);
}
EXPORT int async(float* out, const float* in, int tiles, int valid_tiles, int bug) {
  return launch(async_kernel, LaunchShape{1, kWarpSize, 4 * kTileBytes}, nullptr, out, in, tiles,
                valid_tiles, bug);
}
EXPORT int matrix(float* d, const uint16_t* a, const uint16_t* b, int way, int is_f16) {
  return launch(matrix_kernel, LaunchShape{1, kWarpSize, (16 * 16 + 16 * 8) * sizeof(uint16_t)},
                nullptr, d, a, b, way, is_f16);
}
EXPORT int e4m3(uint32_t* halves, const uint32_t* codes, int words) {
  return launch(e4m3_kernel, LaunchShape{1, words}, nullptr, halves, codes);
}
EXPORT int cluster(float* out, int blocks, int size, int bug) {
  return launch(cluster_kernel, LaunchShape{blocks, kWarpSize, 64, static_cast<unsigned>(size)},
                nullptr, out, size, bug);
}
EXPORT int next_block(float* out, int blocks, int size, int bug) {
  const LaunchShape shape{blocks, kWarpSize, 6 * kWarpSize * sizeof(float),
                          static_cast<unsigned>(size)};
  return launch(next_block_kernel, shape, nullptr, out, size, bug);
}
EXPORT int halves(int* out, int* counters, int blocks, int size, int rounds, int bug) {
  return launch(halves_kernel, LaunchShape{blocks, kWarpSize, 0, static_cast<unsigned>(size)},
                nullptr, out, counters, size, rounds, bug);
}
EXPORT int parted_cluster() {
  return launch(parted_cluster_kernel, LaunchShape{2, kWarpSize, 0, 2}, nullptr);
}
EXPORT int shared_ring(float* out, const float* in, int tiles, int blocks, int size, int bug) {
  CUtensorMap map;
  const auto count = static_cast<cuuint64_t>(tiles);
  const Shape shape = {
      {kTileFloats, count, 1}, {kTileBytes, count * kTileBytes}, {kTileFloats / 2, 1, 1}, false};
  if (const int error = make_map(map, in, shape)) return error;
  const LaunchShape launched{blocks, 2 * kWarpSize, sizeof(Ring), static_cast<unsigned>(size)};
  return launch(shared_ring_kernel, launched, nullptr, out, map, tiles, size, bug);
}
EXPORT int send(float* out, int bug) {
  return launch(send_kernel, LaunchShape{2, kThreads, 8 * kThreads + 2 * sizeof(Barrier), 2},
                nullptr, out, bug);
}
EXPORT int pdl(int* out, int blocks, int bug) {
  return launch(pdl_kernel, LaunchShape{blocks, kThreads, 0, 1, true}, nullptr, out, bug);
}
EXPORT int chain(int* out, int* second, int* first, const int* constant, int lets_next, int bug) {
  const LaunchShape pdl{1, kThreads, 16 * kThreads, 1, true};
  if (const int error = launch(first_of_chain, 1, kThreads, nullptr, first)) return error;
  if (const int error = launch(second_of_chain, pdl, nullptr, second, first, lets_next))
    return error;
  return launch(third_of_chain, pdl, nullptr, out, second, first, constant, bug);
}
EXPORT int convert(const float* in, float* bf16, float* f16, int n) {
  return launch(convert_kernel, ceil_div(n, kThreads), kThreads, nullptr, in, bf16, f16, n);
}
EXPORT int fill(int* out, int64_t blocks, int threads, int64_t shared_bytes, int cluster) {
  const LaunchShape shape{blocks, threads, static_cast<size_t>(shared_bytes),
                          static_cast<unsigned>(cluster)};
  return launch(fill_kernel, shape, nullptr, out);
}
EXPORT int attribute(int which) { return device_attribute(static_cast<cudaDeviceAttr>(which)); }

}  // namespace photon::cuda
