// The Hopper linears for 9 to 64 tokens.
//
// One warp fills two rings in shared memory by tensor copies: one with the CTA's rows of the
// weight, as many stages as fit before the kernel before this one has ended, and one with x, which
// comes from L2. A stage is a slice of 64 columns. Where x is normalized, a warp group multiplies
// each stage of x by the gains as it lands and adds up squares. One or two warp groups multiply: 64
// rows of the weight are the left operand of the matrix instruction, an M tile, the tokens the
// right one. The groups take the M tiles of a stage by turns. What a last M tile reads behind the
// stage's rows is multiplied, too, and not used.
//
// The walk is slice by slice: of slice j the columns 64 j + 512 c for c = 0, 1, ..., in one running
// sum, which is then added to a total. That is the order of stream_common.cuh.
#pragma once
#include "cuda/linear/stream_common.cuh"
#include "cuda/tall_multiply.cuh"
#include "cuda/warpgroup.cuh"

namespace photon::cuda::stream_linear::mid {

constexpr int kGroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kMTileHalfTiles = kWarpgroupRows / kHalfTileRows;
constexpr int kMostSteps = 16;  // more than a ring has stages
constexpr int kMostStages = kMostSteps - 1;
// Floats between the sums of two tokens: lanes that write side by side then meet all banks.
constexpr int kSumsPitch = 12;
constexpr int kMultipliersBarrier = 1, kGainsBarrier = 2;  // numbers of named barriers

// Tokens of the kernel; M tiles of a warp group that multiplies, of which there are two; CTAs an SM
// is to hold; whether the groups divide slices (they have the same rows then, of one M tile) or
// rows.
template <int kTokens_, int kMTiles_, int kResidents_, bool kDivides_>
struct Size {
  static constexpr int kTokens = kTokens_, kGroups = 2, kMTiles = kMTiles_,
                       kResidents = kResidents_;
  static constexpr bool kDivides = kDivides_;
  static constexpr int kSums = kTokens / 2;  // of a lane, for an M tile
  // Slices of a step: two have sums of their own side by side, where registers suffice.
  static constexpr int kStepSlices = kTokens > 32 ? 1 : 2;
  static constexpr int kXSliceBytes = kTokens * kSliceColumns * 2;
  static constexpr int kXBytes = kStepSlices * kXSliceBytes;
  static constexpr int kHalfTileBytes = kStepSlices * kSliceBytes;
  static constexpr int kMultipliers = kGroups * kWarpgroupThreads;
  static constexpr int kMostHalfTiles =
      (kDivides ? 1 : kGroups) * kMTiles * kMTileHalfTiles;  // of a stage
  // The groups' steps come by turns where they divide slices: the first group has the first four of
  // a chunk, some at a time, and the second one the others.
  static constexpr int kTurns = kDivides ? kGroups : 1;
  static constexpr int kTurnSlices = kSlices / kTurns;
  static constexpr int kRounds = kTurnSlices / kStepSlices;
};

template <Epilogue kEpilogue>
constexpr bool kNormalizes = kEpilogue == Epilogue::kOutput;

// A group multiplies, one normalizes, and one fills, of whose warps two have work.
template <typename Size, Epilogue kEpilogue>
constexpr int kCtaThreads =
    Size::kMultipliers + (kNormalizes<kEpilogue> ? 2 : 1) * kWarpgroupThreads;

// Registers that a thread goes on with, by what it does; 0: with those that it began with. All of a
// CTA are those of the launch, so many a thread as all of its CTAs on an SM may have.
struct Registers {
  int multiply, normalize, fill;
};

template <typename Size, Epilogue kEpilogue>
constexpr Registers kRegisters =
    !kNormalizes<kEpilogue> ? (Size::kResidents == 2 ? Registers{96, 0, 40} : Registers{0, 0, 0})
    : Size::kResidents == 1 ? Registers{168, 80, 40}
    : Size::kDivides && Size::kTokens == 32 ? Registers{96, 40, 24}
                                            : Registers{88, 56, 24};

template <int kCount, bool kGrows>
__device__ inline void change_registers() {
  if constexpr (kCount > 0 && kGrows) grow_registers<kCount>();
  if constexpr (kCount > 0 && !kGrows) shrink_registers<kCount>();
}

// Parts of the weight that a stage has: SwiGLU has gate rows and up rows.
template <Epilogue kEpilogue>
__host__ __device__ inline int row_parts(const Params& p) {
  return is_swiglu<kEpilogue>(p) ? 2 : 1;
}

// Where things lie in shared memory, in bytes from its start.
template <typename Size>
struct Layout {
  int ring, x_ring, sums, gain, squares, old, peer, barriers, end;

  constexpr __host__ __device__ Layout(int ring_bytes, int x_bytes, int sums_bytes, int old_tiles,
                                       int peer_tiles, int gains)
      : ring(0),
        x_ring(ring_bytes),
        sums(x_ring + x_bytes),
        gain(sums + sums_bytes),
        squares(gain + (gains * 2 + 127) / 128 * 128),
        old(squares + (gains > 0 ? kSlices * Size::kTokens * 4 : 0)),
        peer(old + old_tiles * kTileRows * Size::kTokens * 2),
        barriers(peer + peer_tiles * kTileRows * Size::kTokens * 4),
        end(barriers +
            (2 * kMostStages + kMostStages + kMostSteps + 2) * static_cast<int>(sizeof(Barrier))) {}

  static constexpr __host__ __device__ int sums_bytes(int half_tiles) {
    return half_tiles * Size::kTokens * kSumsPitch * 4;
  }
};

struct Barriers {
  Barrier *weight_full, *x_full;  // by stage: it has landed
  Barrier* normed;                // by stage of x: it is normalized
  Barrier* empty;                 // by step, modulo kMostSteps: it has been multiplied
  Barrier *arrived, *squared;     // the peer's sums are there; the squares are

  __device__ explicit Barriers(unsigned char* at)
      : weight_full(reinterpret_cast<Barrier*>(at)),
        x_full(weight_full + kMostStages),
        normed(x_full + kMostStages),
        empty(normed + kMostStages),
        arrived(empty + kMostSteps),
        squared(arrived + 1) {}
};

// The half tiles of outputs of a pass: of a SwiGLU, of the gate.
struct HalfTiles {
  int first, count;
};

__device__ inline HalfTiles pass_half_tiles(const Params& p, int half_tiles, int pass) {
  const int first = pass * p.pass_tiles;
  return {first, min(p.pass_tiles, half_tiles - first)};
}

// The steps of a CTA, in order: passes, rounds of slices, their chunks, groups by turns. Columns
// behind the last one arrive as zeros.
template <typename Size>
struct Walk {
  int passes, chunks;
  int pass = 0, slice = 0, chunk = 0, turn = 0;

  __device__ Walk(int passes, int k) : passes(passes), chunks((k + kChunk - 1) / kChunk) {}

  __device__ bool is_done() const { return pass == passes; }
  __device__ int column() const {
    return chunk * kChunk + (turn * Size::kTurnSlices + slice) * kSliceColumns;
  }

  __device__ void advance() {
    if (++turn < Size::kTurns) return;
    turn = 0;
    if (++chunk < chunks) return;
    chunk = 0;
    slice += Size::kStepSlices;
    if (slice < Size::kTurnSlices) return;
    slice = 0;
    ++pass;
  }
};

// What a CTA does, and where.
template <typename Size, Epilogue kEpilogue>
struct Work {
  const Params& p;
  const CtaTiles& share;
  unsigned char* shared;
  Layout<Size> at;
  Barriers barriers;
  int half_tiles, passes, active;

  __device__ Work(const Params& p, const CtaTiles& share, int active)
      : p(p),
        share(share),
        shared(dynamic_shared()),
        at(p.stages * p.stage_bytes, p.x_stages * Size::kXBytes,
           one_pass(p)
               ? 0
               : Layout<Size>::sums_bytes((p.pass_tiles + 1) / 2 * 2 * row_parts<kEpilogue>(p)),
           kNormalizes<kEpilogue> ? 0 : (p.pass_tiles + 1) / 2,
           is_split<kEpilogue>(p) ? p.most_tiles : 0, kNormalizes<kEpilogue> ? p.k : 0),
        barriers(shared + at.barriers),
        half_tiles(share.end_half_tile - share.first_half_tile),
        passes((half_tiles + p.pass_tiles - 1) / p.pass_tiles),
        active(active) {}

  static __host__ __device__ bool one_pass(const Params& p) {
    return p.half_tiles_each + (p.half_tiles_extra > 0 ? 1 : 0) <= p.pass_tiles;
  }

  __device__ Walk<Size> walk() const { return {passes, share.k}; }
  __device__ unsigned char* weight_stage(int i) const { return shared + i * p.stage_bytes; }
  __device__ unsigned char* x_stage(int i) const { return shared + at.x_ring + i * Size::kXBytes; }
  __device__ int pass_rows() const { return one_pass(p) ? half_tiles : p.pass_tiles; }
  // In a stage where groups divide slices, each slice has gate and up rows side by side. Else gate
  // rows of all slices, which one group has, come before the up rows, which the other has.
  __device__ int slice_stride() const {
    return pass_rows() * (Size::kDivides ? row_parts<kEpilogue>(p) : 1) * kSliceBytes;
  }
  __device__ int group_offset(int group) const {
    if (Size::kDivides) return 0;
    return is_swiglu<kEpilogue>(p) ? group * pass_rows() * Size::kHalfTileBytes
                                   : group * Size::kMTiles * kMTileHalfTiles * kSliceBytes;
  }
  // Sums lie where weights were, if there is one pass.
  __device__ float* sums() const {
    return reinterpret_cast<float*>(shared + (one_pass(p) ? at.ring : at.sums));
  }
};

// --- the two warps that fill the rings
// ------------------------------------------------------------

// What is the same in all lanes, and known to the compiler to be.
__device__ inline int of_warp(int value) { return __shfl_sync(kFullWarp, value, 0); }

// All lanes of such a warp together: copies its part of each step as soon as there is room, by
// copy(stage, its barrier, walk). A lane is elected anew for each copy: were it kept, the compiler
// would make a loop over lanes of each.
template <typename Size, Epilogue kEpilogue, typename Copy>
__device__ inline void fill(const Work<Size, kEpilogue>& work, Barrier* full, int stages,
                            const Copy& copy) {
  Stage at, read;
  int step = 0;
#pragma unroll 1
  for (Walk<Size> walk = work.walk(); !walk.is_done(); walk.advance(), at.advance(stages), ++step) {
    if (step >= stages) {
      wait_barrier(&work.barriers.empty[read.index], read.parity);
      read.advance(kMostSteps);
    }
    copy(at.index, &full[at.index], walk);
  }
  __syncwarp();
}

// No kernel before this one writes them.
template <typename Size, Epilogue kEpilogue>
__device__ inline void fill_rows(const Work<Size, kEpilogue>& work) {
  const Params& p = work.p;
  const uint64_t policy = evict_first();
  const bool has_more = work.half_tiles > p.half_tiles_each;  // or passes, whose boxes are alike
  const HalfTileMap& map = p.weight[has_more ? 1 : 0];
  const bool is_gated = is_swiglu<kEpilogue>(p);
  const int rows = of_warp(work.pass_rows()),
            first_row = of_warp(work.share.first_half_tile * kHalfTileRows),
            first_slice = of_warp(work.share.column / kSliceColumns);
  fill(work, work.barriers.weight_full, p.stages,
       [&](int stage, Barrier* full, const Walk<Size>& walk) {
         unsigned char* const to = work.weight_stage(stage);
         const int row = first_row + walk.pass * p.pass_tiles * kHalfTileRows,
                   slice = first_slice + walk.column() / kSliceColumns;
         if (is_elected()) {
           arrive_expecting(full, (is_gated ? 2 : 1) * rows * Size::kHalfTileBytes);
           tensor_copy(to, &map.map, {0, row, slice}, full, policy);
         }
         if (!is_gated) return;
         if constexpr (Size::kDivides && Size::kStepSlices == 2) {  // boxes of one slice
           const int part = rows * kSliceBytes;
           if (is_elected()) tensor_copy(to + part, &map.map, {0, p.n + row, slice}, full, policy);
           if (is_elected())
             tensor_copy(to + 2 * part, &map.map, {0, row, slice + 1}, full, policy);
           if (is_elected())
             tensor_copy(to + 3 * part, &map.map, {0, p.n + row, slice + 1}, full, policy);
         } else {
           if (is_elected())
             tensor_copy(to + rows * Size::kHalfTileBytes, &map.map, {0, p.n + row, slice}, full,
                         policy);
         }
       });
}

// When x is there.
template <typename Size, Epilogue kEpilogue>
__device__ inline void fill_tokens(const Work<Size, kEpilogue>& work) {
  const uint64_t policy = evict_last();
  const int first_slice = of_warp(work.share.column / kSliceColumns);
  wait_for_earlier();
  fence_async_global();
  fill(work, work.barriers.x_full, work.p.x_stages,
       [&](int stage, Barrier* full, const Walk<Size>& walk) {
         const int slice = first_slice + walk.column() / kSliceColumns;
         if (!is_elected()) return;
         arrive_expecting(full, Size::kXBytes);
         tensor_copy(work.x_stage(stage), &work.p.tokens_map.map, {0, 0, slice}, full, policy);
       });
}

// --- the warp group that normalizes x
// -------------------------------------------------------------

// A warp has some tokens, eights of them. `thread`: of the group.
template <typename Size, Epilogue kEpilogue>
__device__ void normalize_tokens(const Work<Size, kEpilogue>& work, int thread) {
  constexpr int kEights = Size::kTokens / kTokenTile, kSteps = Size::kStepSlices;
  constexpr int kOwn = (kEights + kGroupWarps - 1) / kGroupWarps;
  constexpr int kHalfVectors = kSliceColumns * 2 / kHalves;  // bytes
  const Params& p = work.p;
  const int first = of_warp(thread / kWarpSize) * kOwn;
  unsigned char* const gains = work.shared + work.at.gain;
#pragma unroll 1
  for (int i = thread; i < p.k / 8; i += kWarpgroupThreads)
    async_copy16(gains + i * 16, p.gain + i * 8, true);
  commit_copies();
  const LaneVectors own;
  const int offset = own.offset(0) + first * kSliceBytes;
  const bool keeps = own.group / 2 == own.thread;
  float* const squares =
      reinterpret_cast<float*>(work.shared + work.at.squares) + first * kTokenTile + own.row();
  wait_copies<0>();
  sync_threads(kGainsBarrier, kWarpgroupThreads);
  wait_for_earlier();
  if (first >= kEights) return;
  Stage at;
  float sums[Size::kTurns][kSteps][kOwn][2] = {};
#pragma unroll 1
  for (Walk<Size> walk = work.walk(); !walk.is_done();) {
    const int slice = walk.slice, pass = walk.pass;
#pragma unroll
    for (int turn = 0; turn < Size::kTurns; ++turn) {
      const int column = walk.column();
      uint4 v[kSteps][kHalves][kOwn];
      wait_barrier(&work.barriers.x_full[at.index], at.parity);
      unsigned char* const x = work.x_stage(at.index);
      const auto place = [&](int s, int half, int n) {
        return reinterpret_cast<uint4*>(x + (offset ^ half * kHalfVectors) +
                                        s * Size::kXSliceBytes + n * kSliceBytes);
      };
      const auto for_vectors = [&](const auto& body) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int n = 0; n < kOwn; ++n) body(s, half, n);
          }
        }
      };
      for_vectors([&](int s, int half, int n) { v[s][half][n] = *place(s, half, n); });
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const bool is_there = column + s * kSliceColumns < p.k;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          uint4 gain = make_uint4(0, 0, 0, 0);
          if (is_there)
            gain = *reinterpret_cast<const uint4*>(
                gains + (column + s * kSliceColumns + own.column(half)) * 2);
#pragma unroll
          for (int n = 0; n < kOwn; ++n) *place(s, half, n) = times_gain(v[s][half][n], gain);
        }
      }
      fence_async_shared();
      __syncwarp();
      if (is_elected()) arrive(&work.barriers.normed[at.index]);
      for_vectors([&](int s, int half, int n) { add_squares(v[s][half][n], sums[turn][s][n]); });
      at.advance(p.x_stages);
      walk.advance();
    }
    if (walk.slice == slice && walk.pass == pass) continue;
#pragma unroll
    for (int turn = 0; turn < Size::kTurns; ++turn) {  // slices are complete
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          float (&sum)[2] = sums[turn][s][n];
          if (keeps && pass == 0)
            squares[(turn * Size::kTurnSlices + slice + s) * Size::kTokens + n * kTokenTile] =
                own.group % 2 == 0 ? sum[0] : sum[1];
          sum[0] = sum[1] = 0.0f;
        }
      }
    }
    if (pass > 0 || walk.pass == 0) continue;
    __syncwarp();
    if (is_elected()) arrive(work.barriers.squared);
  }
}

// --- the warp groups that multiply
// ----------------------------------------------------------------

template <typename Size, Epilogue kEpilogue>
struct Multiplier {
  static constexpr int kMTiles = Size::kMTiles, kSteps = Size::kStepSlices;
  // Rounds whose sums are kept: where groups divide slices, the second one adds its own to the
  // first one's total at the end.
  static constexpr int kKept = Size::kDivides ? Size::kRounds : 1;
  using Sums = float[kMTiles][Size::kSums];

  const Work<Size, kEpilogue>& work;
  int group, offset, slice_stride;  // of its rows in a stage, in bytes
  Stage weight_at, x_at;
  int step;
  Sums sums[kKept][kSteps], totals;

  __device__ Multiplier(const Work<Size, kEpilogue>& work, int group)
      : work(work),
        group(group),
        offset(of_warp(work.group_offset(group))),
        slice_stride(of_warp(work.slice_stride())),
        step(Size::kDivides ? group : 0) {
    if (Size::kDivides && group > 0) {
      weight_at.advance(work.p.stages);
      x_at.advance(work.p.x_stages);
    }
  }

  // The totals of a pass, or the sums that are kept.
  __device__ void run(const Stamps& stamps, bool is_first) {
    const int steps = (work.share.k + kChunk - 1) / kChunk;
    if constexpr (Size::kDivides) {
#pragma unroll
      for (int round = 0; round < kKept; ++round)
        add_slices(sums[round], steps, stamps, is_first && round == 0);
    } else {
      clear(totals);
#pragma unroll 1
      for (int round = 0; round < Size::kRounds; ++round) {
        add_slices(sums[0], steps, stamps, is_first && round == 0);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int i = 0; i < Size::kSums; ++i) totals[m][i] = after(totals[m][i], m, i);
        }
      }
    }
  }

  // What is kept of a sum is added to the sum of the slices before, slice by slice.
  __device__ float after(float before, int m, int i) const {
#pragma unroll
    for (int round = 0; round < kKept; ++round) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) before += sums[round][s][m][i];
    }
    return before;
  }

  __device__ static void clear(Sums& all) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < Size::kSums; ++i) all[m][i] = 0.0f;
    }
  }

 private:
  __device__ Barrier* ready() const {
    return kNormalizes<kEpilogue> ? work.barriers.normed : work.barriers.x_full;
  }

  // While a step is multiplied, the one before is done and is given back.
  __device__ void add_slices(Sums (&of_slices)[kSteps], int steps, const Stamps& stamps,
                             bool is_first) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) clear(of_slices[s]);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      wait_barrier(&work.barriers.weight_full[weight_at.index], weight_at.parity);
      wait_barrier(&ready()[x_at.index], x_at.parity);
      if (is_first && i == 0) stamps.at(Point::kLoaded);
      multiply(of_slices, HalfTileFragment(work.weight_stage(weight_at.index) + offset),
               HalfTileFragment(work.x_stage(x_at.index)));
      if (i > 0) {
        warpgroup_wait_but<1>();
        give_back(step - Size::kTurns);
      }
      step += Size::kTurns;
#pragma unroll
      for (int turn = 0; turn < Size::kTurns; ++turn) {
        weight_at.advance(work.p.stages);
        x_at.advance(work.p.x_stages);
      }
    }
    warpgroup_wait_but<0>();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) warpgroup_settle(of_slices[s][m]);
    }
    give_back(step - Size::kTurns);
  }

  __device__ void multiply(Sums (&of_slices)[kSteps], const HalfTileFragment& rows,
                           const HalfTileFragment& x) {
    warpgroup_begin();
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
          warpgroup_multiply<kSliceBytes, kSliceBytes>(
              of_slices[s][m], rows.after(s * slice_stride + m * kMTileHalfTiles * kSliceBytes),
              x.after(s * Size::kXSliceBytes), depth);
      }
    }
    warpgroup_commit();
  }

  __device__ void give_back(int done) const {
    if (threadIdx.x % kWarpSize == 0) arrive(&work.barriers.empty[done % kMostSteps]);
  }
};

// The end of a pass: totals go to shared memory, and all threads that multiply make outputs of
// them.
template <typename Size, Epilogue kEpilogue>
__device__ void finish(const Multiplier<Size, kEpilogue>& multiplier,
                       const Work<Size, kEpilogue>& work, const Output<kEpilogue>& output,
                       const HalfTiles& pass) {
  constexpr int kTokens = Size::kTokens;
  float* const sums = work.sums();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % kGroupWarps;
  const bool is_gated = is_swiglu<kEpilogue>(work.p);
  // A last tile may have one half tile; what stands in the place of the other is not used.
  const int padded = (pass.count + 1) / 2 * 2,
            first = Size::kDivides ? 0
                    : is_gated     ? multiplier.group * pass.count
                                   : multiplier.group * Size::kMTiles * kMTileHalfTiles,
            end = !is_gated        ? padded
                  : Size::kDivides ? 2 * pass.count
                                   : first + pass.count;
  const auto for_places = [&](const auto& body) {
#pragma unroll
    for (int m = 0; m < Size::kMTiles; ++m) {
      const int half_tile = first + m * kMTileHalfTiles + warp * kTileHalfTiles;
#pragma unroll
      for (int half = 0; half < kTileHalfTiles; ++half) {
        if (half_tile + half >= end) continue;
        float* const to =
            sums + ((half_tile + half) * kTokens + 2 * (lane % 4)) * kSumsPitch + lane / 4;
#pragma unroll
        for (int i = 0; i < Size::kSums / 2; ++i)
          body(to[(i / 2 * kTokenTile + i % 2) * kSumsPitch], m, i / 2 * 4 + half * 2 + i % 2);
      }
    }
  };
  sync_threads(kMultipliersBarrier, Size::kMultipliers);  // nobody reads what sums lie over
  if constexpr (Size::kDivides) {
    if (multiplier.group == 0) {
      for_places([&](float& place, int m, int i) { place = multiplier.after(0.0f, m, i); });
    }
    sync_threads(kMultipliersBarrier, Size::kMultipliers);
    if (multiplier.group == 1)
      for_places([&](float& place, int m, int i) { place = multiplier.after(place, m, i); });
  } else {
    for_places([&](float& place, int m, int i) { place = multiplier.totals[m][i]; });
  }
  if constexpr (!kNormalizes<kEpilogue>) wait_copies<0>();
  sync_threads(kMultipliersBarrier, Size::kMultipliers);
  if constexpr (kNormalizes<kEpilogue>) wait_barrier(work.barriers.squared, 0);
  const int each = is_gated ? 1 : kTileHalfTiles, second = is_gated ? pass.count : 1;
  const int tiles = (pass.count + each - 1) / each;
  constexpr int kAtOnce = Size::kMultipliers / kHalfTileRows;
  constexpr int kTokensAtOnce = kTokens < kAtOnce ? kTokens : kAtOnce;
  constexpr int kTilesAtOnce = kAtOnce / kTokensAtOnce;
  const int g = threadIdx.x % kHalfTileRows, place = threadIdx.x / kHalfTileRows;
#pragma unroll 1
  for (int token = place % kTokensAtOnce; token < work.active; token += kTokensAtOnce) {
    const float scale = output.scale(token);
#pragma unroll 1
    for (int tile = place / kTokensAtOnce; tile < tiles; tile += kTilesAtOnce) {
      const float* const low = sums + (tile * each * kTokens + token) * kSumsPitch + g;
      output.take(tile, g, token, scale, low[0], low[second * kTokens * kSumsPitch]);
    }
  }
}

template <typename Size, Epilogue kEpilogue>
__device__ void multiply_passes(const Work<Size, kEpilogue>& work, const Stamps& stamps) {
  const Params& p = work.p;
  const auto floats = [&](int offset) { return reinterpret_cast<float*>(work.shared + offset); };
  Bf16* const old = reinterpret_cast<Bf16*>(work.shared + work.at.old);
  Output<kEpilogue> output{p,
                           work.share,
                           floats(work.at.squares),
                           old,
                           floats(work.at.peer),
                           work.barriers.arrived,
                           Size::kTokens,
                           0};
  if (threadIdx.x == 0) output.expect_peer(work.active);
  Multiplier<Size, kEpilogue> multiplier(
      work, of_warp(static_cast<int>(threadIdx.x) / kWarpgroupThreads));
  wait_for_earlier();
  stamps.at(Point::kWaited);
#pragma unroll 1
  for (int pass = 0; pass < work.passes; ++pass) {
    const HalfTiles rows = pass_half_tiles(p, work.half_tiles, pass);
    output.first_tile = rows.first / tile_half_tiles<kEpilogue>(p);
    if constexpr (!kNormalizes<kEpilogue>) {
      if (pass > 0) sync_threads(kMultipliersBarrier, Size::kMultipliers);
      output.fetch_old(old, (rows.count + 1) / 2, work.active, Size::kMultipliers);
    }
    multiplier.run(stamps, pass == 0);
    stamps.at(Point::kSummed);
    finish<Size, kEpilogue>(multiplier, work, output, rows);
    stamps.at(Point::kStored);
  }
}

template <typename Size, Epilogue kEpilogue>
__device__ void run_block(const Params& p) {
  const Stamps stamps = stamps_of<kEpilogue>(p);
  let_next_start();
  const int counts = live_tokens(p);
  const CtaTiles share = cta_tiles<kEpilogue>(p);
  const int active = min(counts, p.tokens);
  const Work<Size, kEpilogue> work(p, share, active);
  const Barriers& barriers = work.barriers;
  const int i = static_cast<int>(threadIdx.x);
  if (i < kMostStages) {
    init_barrier(&barriers.weight_full[i], 1);
    init_barrier(&barriers.x_full[i], 1);
    init_barrier(&barriers.normed[i],
                 min(kGroupWarps, Size::kTokens / kTokenTile));  // warps that normalize
  }
  if (i < kMostSteps)
    init_barrier(&barriers.empty[i], Size::kMultipliers / kWarpSize / Size::kTurns);
  if (i == kWarpSize - 1) {
    init_barrier(barriers.arrived, 1);
    init_barrier(barriers.squared, min(kGroupWarps, Size::kTokens / kTokenTile));
    prefetch_half_tile_map(p.weight[0]);
    prefetch_half_tile_map(p.weight[1]);
    prefetch_half_tile_map(p.tokens_map);
  }
  if (i < kWarpSize) fence_barriers();
  __syncthreads();
  if (is_split<kEpilogue>(p)) {
    enter_cluster();
    meet_cluster();  // the neighbour has initialized `arrived` before anything is sent to it
  }
  if (active <= 0 || share.tiles == 0) return wait_for_earlier();
  constexpr Registers kCounts = kRegisters<Size, kEpilogue>;
  const int role = of_warp(i / kWarpgroupThreads), warp = of_warp(i / kWarpSize % kGroupWarps);
  if (role < Size::kGroups) {
    change_registers<kCounts.multiply, true>();
    multiply_passes<Size, kEpilogue>(work, stamps);
  } else if (kNormalizes<kEpilogue> && role == Size::kGroups) {
    change_registers<kCounts.normalize, false>();
    if constexpr (kNormalizes<kEpilogue>)
      normalize_tokens<Size, kEpilogue>(work, i - Size::kMultipliers);
  } else {
    change_registers<kCounts.fill, false>();
    if (warp == 0) fill_rows<Size, kEpilogue>(work);
    if (warp == 1) fill_tokens<Size, kEpilogue>(work);
    wait_for_earlier();
  }
}

}  // namespace photon::cuda::stream_linear::mid
