// Linears of 129 tokens and more, to be timed beside torch's: a persistent kernel with a warp that
// copies, two groups that multiply, tiles of 128 or 256 tokens, and outputs or SwiGLU behind the
// sums. many_tokens.py builds, checks and times it; FINDINGS.md has what came of it.
#include <algorithm>
#include <iterator>

#include "cuda/linear/batch_finish.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::batch {
namespace {

enum class Mode { kWhole, kNoCopies, kNoProducts };

constexpr int kGroups = 2, kManyThreads = (kGroups + 1) * kWarpgroupThreads;
constexpr int kMostStages = 8, kBarrierBytes = 2 * kMostStages * 8;

struct ManyParams {
  RowTileMap x, rest, weight;  // rest: of x, the tokens of the last tile
  Bf16* out;
  int tokens, n, steps, token_tiles, tiles;
};

// kBlocks: of 64 tokens, of a group. A stage: x, then rows.
template <int kBlocks, int kRows>
struct Ring {
  static constexpr int kTileTokens = kGroups * kBlocks * kBatchBlockTokens;
  static constexpr int kXBytes = kTileTokens * kBatchRowBytes;
  static constexpr int kStageBytes = kXBytes + kRows * kBatchRowBytes;
  static constexpr int kFitting = (kOnlyBlock - kBarrierBytes) / kStageBytes;
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;

  unsigned char* shared;

  __device__ unsigned char* x(int stage) const { return shared + stage * kStageBytes; }
  __device__ Barrier* full(int stage) const {
    return reinterpret_cast<Barrier*>(shared + kStages * kStageBytes) + stage;
  }
  __device__ Barrier* empty(int stage) const { return full(kMostStages + stage); }
};

constexpr int kMostSms = 256;
__device__ long long clocks[kMostSms][2];  // of each SM, and nanoseconds, at its last CTA's end

// Word j of lane t of each four lanes goes to lane j, as word t.
__device__ void transpose_words(uint32_t (&w)[4]) {
  const bool is_odd = threadIdx.x % 2 != 0, is_high = threadIdx.x % 4 > 1;
  uint32_t a = is_odd ? w[0] : w[1], b = is_odd ? w[2] : w[3];
  a = __shfl_xor_sync(~0u, a, 1);
  b = __shfl_xor_sync(~0u, b, 1);
  (is_odd ? w[0] : w[1]) = a;
  (is_odd ? w[2] : w[3]) = b;
  a = is_high ? w[0] : w[2];
  b = is_high ? w[1] : w[3];
  a = __shfl_xor_sync(~0u, a, 2);
  b = __shfl_xor_sync(~0u, b, 2);
  (is_high ? w[0] : w[2]) = a;
  (is_high ? w[1] : w[3]) = b;
}

// Outputs of one block: 8 or 16 bytes a lane, after an exchange among four.
template <int kRows, Finish kFinish>
__device__ void write_block(const ManyParams& p, const float (&s)[kRows / 2], int token,
                            int first) {
  constexpr bool kPairs = kFinish == Finish::kSwiglu;
  constexpr int kStep = kPairs ? 8 : 4;  // eights of rows that four lanes exchange
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half, token += 8) {
    Bf16* const row = p.out + int64_t{token} * p.n + first;
    const bool is_live = token < p.tokens;
#pragma unroll
    for (int i = 0; i + kStep <= kRows / 8; i += kStep) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const sums = s + 4 * (i + j * kStep / 4) + 2 * half;
        w[j] = kPairs ? fast_silu_times(sums[0], sums[1], sums[4], sums[5])
                      : pack_bf16(sums[0], sums[1]);
      }
      transpose_words(w);
      if constexpr (kPairs) {
        const uint32_t low = __byte_perm(w[0], w[1], 0x5410),
                       high = __byte_perm(w[0], w[1], 0x7632);
        w[1] = __byte_perm(w[2], w[3], 0x5410);
        w[3] = __byte_perm(w[2], w[3], 0x7632);
        w[0] = low;
        w[2] = high;
      }
      const int column = (kPairs ? i * 4 : i * 8) + t * 8;
      if (!is_live || first + column >= p.n) continue;
      uint2* const to = reinterpret_cast<uint2*>(row + column);
      to[0] = make_uint2(w[0], w[1]);
      if (first + column + 4 < p.n) to[1] = make_uint2(w[2], w[3]);
    }
#pragma unroll
    for (int i = kRows / 8 / kStep * kStep; i < kRows / 8; ++i) {  // what is left over
      const float* const sums = s + 4 * i + 2 * half;
      const int column = kPairs ? i * 4 + t : i * 8 + t * 2;
      if (!is_live || first + column >= p.n) continue;
      const uint32_t w =
          kPairs ? fast_silu_times(sums[0], sums[1], 0, 0) : pack_bf16(sums[0], sums[1]);
      if (kPairs)
        *reinterpret_cast<uint16_t*>(row + column) = static_cast<uint16_t>(w);
      else
        *reinterpret_cast<uint32_t*>(row + column) = w;
    }
  }
}

template <int kBlocks, int kRows, Finish kFinish>
__device__ void fill(const ManyParams& p, const Ring<kBlocks, kRows>& ring) {
  using R = Ring<kBlocks, kRows>;
  // x kept in L2 takes a third less time to copy than x without preference.
  const uint64_t policy = evict_normal(), x_policy = evict_last();
  const auto copy_rows = [&](int tile, int step, int stage) {
    const int row = tile / p.token_tiles * kOutputs<kRows, kFinish>;
    const int token = tile % p.token_tiles * R::kTileTokens;
    const int bytes = R::kStageBytes - R::kXBytes + min(p.tokens - token, R::kTileTokens) * 128;
    arrive_expecting(ring.full(stage), bytes);
    const TensorPlace from =
        kFinish == Finish::kSwiglu ? TensorPlace{step * 64, 0, row} : TensorPlace{0, row, step};
    tensor_copy(ring.x(stage) + R::kXBytes, &p.weight.map, from, ring.full(stage), policy);
  };
  const auto copy_tokens = [&](int tile, int step, int stage) {
    const int token = tile % p.token_tiles * R::kTileTokens;
    const bool is_whole = token + R::kTileTokens <= p.tokens;
    tensor_copy(ring.x(stage), is_whole ? &p.x.map : &p.rest.map, {0, token, step},
                ring.full(stage), x_policy);
  };
  Stage at;
  int tile = static_cast<int>(blockIdx.x), step = 0;
  for (; step < min(R::kStages, p.steps); ++step)
    if (is_elected()) copy_rows(tile, step, step);
  wait_for_earlier();
  fence_async_global();
  for (int i = 0; i < step; ++i, at.advance(R::kStages))
    if (is_elected()) copy_tokens(tile, i, i);
  for (; tile < p.tiles; tile += static_cast<int>(gridDim.x), step = 0) {
#pragma unroll 1
    for (; step < p.steps; ++step, at.advance(R::kStages)) {
      wait_barrier(ring.empty(at.index), at.parity ^ 1);
      if (is_elected()) {
        copy_rows(tile, step, at.index);
        copy_tokens(tile, step, at.index);
      }
    }
  }
  __syncwarp();
}

// kLive: blocks of the group that have tokens. `sums` is the caller's, or the compiler has it twice
// and spills.
template <int kLive, int kBlocks, int kRows, Finish kFinish, Mode kMode>
__device__ void take_tile(const ManyParams& p, const Ring<kBlocks, kRows>& ring, int tile,
                          Stage& at, float (&sums)[kBlocks][kRows / 2]) {
  using R = Ring<kBlocks, kRows>;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const auto give_back = [&](int stage) {
    if (kMode != Mode::kNoCopies && threadIdx.x % 32 == 0) arrive(ring.empty(stage));
  };
  int before = 0;
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    if constexpr (kMode != Mode::kNoCopies) wait_barrier(ring.full(at.index), at.parity);
    if constexpr (kMode != Mode::kNoProducts && kLive > 0) {
      const RowTileFragment x(ring.x(at.index) + group * kBlocks * 64 * kBatchRowBytes),
          rows(ring.x(at.index) + R::kXBytes);
      warpgroup_begin();
#pragma unroll
      for (int depth = 0; depth < 4; ++depth)
#pragma unroll
        for (int i = 0; i < kLive; ++i)
          multiply_rows(sums[i], x.after(i * 64 * kBatchRowBytes), rows, depth,
                        step > 0 || depth > 0);
      warpgroup_commit();
      if (step > 0) warpgroup_wait_but<1>();
    }
    if (step > 0) give_back(before);
    before = at.index;
    at.advance(R::kStages);
  }
  if constexpr (kMode != Mode::kNoProducts && kLive > 0) {
    warpgroup_wait_but<0>();
#pragma unroll
    for (int i = 0; i < kLive; ++i) warpgroup_settle(sums[i]);
  }
  give_back(before);
  if constexpr (kMode != Mode::kNoProducts) {
    const int token = tile % p.token_tiles * R::kTileTokens + group * kBlocks * 64 +
                      static_cast<int>(threadIdx.x) / 32 % 4 * 16 +
                      static_cast<int>(threadIdx.x) % 32 / 4;
    const int first = tile / p.token_tiles * kOutputs<kRows, kFinish>;
#pragma unroll
    for (int i = 0; i < kLive; ++i) write_block<kRows, kFinish>(p, sums[i], token + i * 64, first);
  }
}

template <int kBlocks, int kRows, Finish kFinish, Mode kMode>
__global__ void __launch_bounds__(kManyThreads, 1) many(const __grid_constant__ ManyParams p) {
  using R = Ring<kBlocks, kRows>;
  let_next_start();
  const R ring{dynamic_shared()};
  if (threadIdx.x < R::kStages) {
    init_barrier(ring.full(threadIdx.x), 1);
    init_barrier(ring.empty(threadIdx.x), kGroups * 4);
  }
  if (threadIdx.x < 32) fence_barriers();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (group == kGroups) {
    shrink_registers<40>();
    if (threadIdx.x % kWarpgroupThreads < 32 && kMode != Mode::kNoCopies)
      fill<kBlocks, kRows, kFinish>(p, ring);
    else
      wait_for_earlier();
  } else {
    grow_registers<232>();
    wait_for_earlier();
    float sums[kBlocks][kRows / 2];
    Stage at;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles;
         tile += static_cast<int>(gridDim.x)) {
      const int first = tile % p.token_tiles * R::kTileTokens + group * kBlocks * 64;
      const int live = min((p.tokens - first + 63) / 64, kBlocks);
      if (live == kBlocks)
        take_tile<kBlocks, kBlocks, kRows, kFinish, kMode>(p, ring, tile, at, sums);
      else if (kBlocks == 2 && live == 1)
        take_tile<1, kBlocks, kRows, kFinish, kMode>(p, ring, tile, at, sums);
      else
        take_tile<0, kBlocks, kRows, kFinish, kMode>(p, ring, tile, at, sums);
    }
    if (threadIdx.x == 0) {
      unsigned sm;
      long long ns;
      asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
      clocks[sm % kMostSms][0] = clock64();
      clocks[sm % kMostSms][1] = ns;
    }
  }
}

// --- host ----------------------------------------------------------------------------------------

struct Call {
  const void *x, *weight;
  void *out, *stream;
  int tokens, n, k;  // n: of outputs
};

template <int kBlocks, int kRows, Finish kFinish, Mode kMode>
int run_many(const Call& c) {
  using R = Ring<kBlocks, kRows>;
  constexpr int kEach = kOutputs<kRows, kFinish>;
  ManyParams p{};
  p.out = static_cast<Bf16*>(c.out);
  p.tokens = c.tokens;
  p.n = c.n;
  p.steps = c.k / 64;
  p.token_tiles = static_cast<int>(ceil_div(c.tokens, R::kTileTokens));
  p.tiles = p.token_tiles * static_cast<int>(ceil_div(c.n, kEach));
  const int rest = c.tokens - (p.token_tiles - 1) * R::kTileTokens;
  int error = make_row_tile_map(p.x, 1, c.x, c.tokens, c.k, c.k, R::kTileTokens);
  if (error == 0) error = make_row_tile_map(p.rest, 1, c.x, c.tokens, c.k, c.k, rest);
  if (error == 0 && kFinish == Finish::kSwiglu) {
    const cuuint64_t sizes[] = {cuuint64_t(c.k), 2, cuuint64_t(c.n)};
    const cuuint64_t strides[] = {cuuint64_t{2} * c.n * c.k, cuuint64_t{2} * c.k};
    const cuuint32_t box[] = {64, 2, kEach};
    error = make_tensor_map(p.weight, c.weight, sizes, strides, box);
  } else if (error == 0) {
    error = make_row_tile_map(p.weight, 1, c.weight, c.n, c.k, c.k, kRows);
  }
  if (error != 0) return error;
  LaunchShape shape{std::min(p.tiles, sms()), kManyThreads};
  shape.shared_bytes = kOnlyBlock;
  shape.pdl = true;
  return launch(many<kBlocks, kRows, kFinish, kMode>, shape, c.stream, p);
}

struct Tile {
  int tokens, rows;
  Finish finish;
  int (*run[3])(const Call&);  // by mode
};

template <int kBlocks, int kRows, Finish kFinish>
constexpr Tile tile_of() {
  return {Ring<kBlocks, kRows>::kTileTokens,
          kRows,
          kFinish,
          {run_many<kBlocks, kRows, kFinish, Mode::kWhole>,
           run_many<kBlocks, kRows, kFinish, Mode::kNoCopies>,
           run_many<kBlocks, kRows, kFinish, Mode::kNoProducts>}};
}

const Tile kTiles[] = {tile_of<1, 96, Finish::kOutput>(),  tile_of<1, 128, Finish::kOutput>(),
                       tile_of<1, 192, Finish::kOutput>(), tile_of<2, 96, Finish::kOutput>(),
                       tile_of<2, 128, Finish::kOutput>(), tile_of<2, 160, Finish::kOutput>(),
                       tile_of<2, 128, Finish::kSwiglu>(), tile_of<2, 152, Finish::kSwiglu>(),
                       tile_of<2, 192, Finish::kSwiglu>()};

}  // namespace
}  // namespace photon::cuda::batch

// A tile by its place in the table; false: there is none.
extern "C" bool many_tile(int index, int* tokens, int* rows, bool* is_swiglu) {
  using namespace photon::cuda::batch;
  if (index >= static_cast<int>(std::size(kTiles))) return false;
  *tokens = kTiles[index].tokens;
  *rows = kTiles[index].rows;
  *is_swiglu = kTiles[index].finish == Finish::kSwiglu;
  return true;
}

// out [tokens, n] = x [tokens, k] weight [n, k]^T, or SwiGLU with weight [2 n, k]: all contiguous,
// bfloat16, k a multiple of 64 and n of 8. Returns the error.
extern "C" int many_linear(int index, int mode, const void* x, const void* weight, void* out,
                           int tokens, int n, int k, void* stream) {
  using namespace photon::cuda::batch;
  return kTiles[index].run[mode]({x, weight, out, stream, tokens, n, k});
}

// Of each SM its clock, and nanoseconds, when its last CTA ended: 512 values. Waits for launches.
extern "C" int many_clocks(long long* to) {
  return cudaMemcpyFromSymbol(to, photon::cuda::batch::clocks, sizeof(photon::cuda::batch::clocks));
}
