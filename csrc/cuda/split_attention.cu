// fused_attention_decode for Hopper and later: a line's past is cut into splits that depend on its length alone (common/kv_split.h). A
// block takes runs of them (split_work.cuh), about as many positions as every other block; where a line's splits are in several blocks, the
// last of them to finish merges the splits in order, or where teams are few and pasts short, the blocks are a cluster, in whose shared
// memory the splits meet (split_meeting.cuh). So one line keeps the whole device busy, many lines cost no more merging than they must, and
// a line's bits are the same whichever step it rides in. After flash-decoding (Dao et al., 2023).
//
// A kernel of a chain: before wait_for_earlier() it reads decode_meta, the page table, the angles, the norms' weights and old positions of
// the cache, as many as its ring holds (split_ring.cuh), which at few lines and short pasts is all that it reads of them at all.
#include "cuda/split_attention.cuh"

#include "cuda/attend.cuh"
#include "cuda/launch.cuh"
#include "cuda/new_vectors.cuh"
#include "cuda/residency.cuh"
#include "cuda/split_attention.h"
#include "cuda/split_meeting.cuh"

namespace photon::cuda {
namespace {

constexpr int64_t kFewLines = 8;   // one block a multiprocessor; of more lines two, which hide each other's waits
constexpr int kLoneLines = 2;      // whose keys and values are requested in a moment, so that the next kernel need not come behind them
constexpr int64_t kUnfilled = 16;  // of so many multiprocessors clusters of 4 and 8 leave one: of 4 blocks 31 fit on an H200, of 8 15
constexpr int kMergedAtOnce = 4;   // splits in flight

// What a split leaves for the merge: of each query head the sums, which are of exp2(score - high) * v, and what they weigh.
struct Partials {
  float* sums;        // [lines * q_heads, splits, head_dim]
  Weight* weights;    // [lines * q_heads, splits]
  unsigned* arrived;  // [teams]; zero between calls
};

// What comes of a run, as the block's threads hold it, and where it goes.
template <int kHeadDim, int kHalves>
struct RunResults {
  using Sums = DimSoftmax<kHeadDim, kHalves>;
  using Part = typename Sums::Part;

  const SplitGrid& grid;
  const Partials& partials;
  const RunCursor& run;
  TeamHeads heads;
  bool is_live;  // else the line is zeros

  // body(half, query head of the line) for those of this lane's queries that there are.
  template <typename Body>
  __device__ void for_queries(const Body& body) const {
    if (!Sums::has_dims()) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int query = Sums::query(half);
      if (query < heads.count) body(half, heads.first + query);
    }
  }

  __device__ int64_t partial_at(int head, int split) const {
    return (static_cast<int64_t>(run.index) * grid.q_heads + head) * grid.splits.of + split;
  }

  // The team's result, which the first crew has.
  __device__ void write(const Sums& sums) const {
    if (SplitShape<kHeadDim>::crew() > 0) return;
    for_queries([&](int half, int head) {
      const Part& part = sums.parts[half];
      const float share = part.weight.sum == 0.0f ? 0.0f : 1.0f / part.weight.sum;
      Bf16* out = grid.out.at(run.index, head);
#pragma unroll
      for (int piece = 0; piece < Sums::kPieces; ++piece) {
        const uint32_t pair = pack_bf16(share * part.sum[2 * piece], share * part.sum[2 * piece + 1]);
        *reinterpret_cast<uint32_t*>(out + Sums::dim(piece)) = is_live ? pair : 0;
      }
    });
  }

  // One split's, for the block that merges.
  __device__ void leave(const Sums& sums, int split) const {
    for_queries([&](int half, int head) {
      const Part& part = sums.parts[half];
      const int64_t at = partial_at(head, split);
#pragma unroll
      for (int piece = 0; piece < Sums::kPieces; ++piece) {
        *reinterpret_cast<float2*>(partials.sums + at * kHeadDim + Sums::dim(piece)) = {part.sum[2 * piece], part.sum[2 * piece + 1]};
      }
      if (Sums::dim(0) == 0) partials.weights[at] = part.weight;
    });
  }

  // Merges the splits in order, by the first crew. What is read here was written by the first crews of all blocks, before
  // is_last_to_arrive().
  __device__ void merge() const {
    if (SplitShape<kHeadDim>::crew() > 0) return;
    Sums sums;
    for_queries([&](int half, int head) {
      Part& total = sums.parts[half];
#pragma unroll 1
      for (int from = 0; from < run.cut.splits; from += kMergedAtOnce) {
        Part parts[kMergedAtOnce];
#pragma unroll
        for (int j = 0; j < kMergedAtOnce; ++j) parts[j] = left(head, min(from + j, run.cut.splits - 1));
        if (from == 0) {
          total = parts[0];
        } else {
          total.add(parts[0]);
        }
#pragma unroll
        for (int j = 1; j < kMergedAtOnce; ++j) {
          if (from + j < run.cut.splits) total.add(parts[j]);
        }
      }
    });
    write(sums);
  }

 private:
  __device__ Part left(int head, int split) const {
    const int64_t at = partial_at(head, split);
    Part part;
    part.weight = partials.weights[at];
#pragma unroll
    for (int piece = 0; piece < Sums::kPieces; ++piece) {
      const float2 pair = *reinterpret_cast<const float2*>(partials.sums + at * kHeadDim + Sums::dim(piece));
      part.sum[2 * piece] = pair.x;
      part.sum[2 * piece + 1] = pair.y;
    }
    return part;
  }
};

// How what a block's crews have summed of a split comes together, in order: in the first crew, whom the others hand theirs over in shared
// memory. `slot`: the calling warp is done with it. All threads must call it; a barrier of the block is to follow.
template <int kHeadDim, int kHalves>
struct CrewMeeting {
  using Shape = SplitShape<kHeadDim>;
  using Sums = DimSoftmax<kHeadDim, kHalves>;
  static constexpr int kFloats = sizeof(Sums) / sizeof(float);
  using Crew = float[kFloats][Shape::kCrewThreads];
  static_assert(sizeof(Crew) <= Shape::kSlotBytes / Shape::kCrews);

  __device__ static void join(Sums& sums, unsigned char* slot) {
    if constexpr (Shape::kCrews == 1) return;
    sync_crew<kHeadDim>();
    if (Shape::crew() > 0) hand_over(sums, crew_part(slot, Shape::crew()));
    __syncthreads();
    if (Shape::crew() > 0) return;
#pragma unroll
    for (int other = 1; other < Shape::kCrews; ++other) sums.add(handed_over(crew_part(slot, other)));
  }

 private:
  __device__ static Crew& crew_part(unsigned char* slot, int crew) {
    return *reinterpret_cast<Crew*>(slot + crew * (Shape::kSlotBytes / Shape::kCrews));
  }

  __device__ static void hand_over(const Sums& own, Crew& to) {
    const float* floats = reinterpret_cast<const float*>(&own);
#pragma unroll
    for (int i = 0; i < kFloats; ++i) to[i][threadIdx.x % Shape::kCrewThreads] = floats[i];
  }

  __device__ static Sums handed_over(const Crew& from) {
    Sums sums;
    float* floats = reinterpret_cast<float*>(&sums);
#pragma unroll
    for (int i = 0; i < kFloats; ++i) floats[i] = from[i][threadIdx.x % Shape::kCrewThreads];
    return sums;
  }
};

// Whether this block is the last of its team's; then it sees what all of them wrote. All threads must call it, after writing.
__device__ bool is_last_to_arrive(unsigned* arrived, int blocks, bool& shared_answer) {
  const unsigned last = static_cast<unsigned>(blocks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) shared_answer = count_round(arrived, last) == last;
  __syncthreads();
  return shared_answer;
}

// Puts the new key (or value) into its row of the warp's tile.
template <int kHeadDim>
__device__ void patch_tile(unsigned char* tile, int token, const Bf16* row) {
  using Shape = SplitShape<kHeadDim>;
  const int vector = threadIdx.x % kWarpSize;
  if (vector < Shape::kVectors) {
    *reinterpret_cast<uint4*>(tile + Shape::place(token, vector)) = reinterpret_cast<const uint4*>(row)[vector];
  }
  __syncwarp();
}

// Zeros for the lines that attend to nothing and have no run.
template <int kHeadDim>
__device__ void clear_dead_lines(const SplitGrid& grid) {
  constexpr int kVectors = kHeadDim / kPack;
#pragma unroll 1
  for (int line = blockIdx.x; line < grid.lines; line += gridDim.x) {
    if (grid.past_length(line) > 0) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < grid.q_heads * kVectors; i += blockDim.x) {
      reinterpret_cast<uint4*>(grid.out.at(line, i / kVectors))[i % kVectors] = {0, 0, 0, 0};
    }
  }
}

// A block's runs, one loop over all of them: what it does by the way has its code once.
template <int kHeadDim, int kHalves>
__device__ void attend_runs(const RopeParams& rope, float scale, const SplitGrid& grid, const Partials& partials) {
  using Shape = SplitShape<kHeadDim>;
  SplitShared<kHeadDim, kHalves>& shared = *reinterpret_cast<SplitShared<kHeadDim, kHalves>*>(dynamic_shared());
  if (grid.lines <= kLoneLines) let_next_start();
  LineCut own;
  const Share share = Share::of_block(grid, own);
  RunCursor first;
  first.seek(grid, share, own);
  const ClusterMeeting<kHeadDim, kHalves> meeting(grid, share, first, shared);
  if (grid.rank_bits > 0) meeting.open();
  KvRing<kHeadDim> ring(grid, share, first, shared.ring);
  bool is_live = false, is_begin = true;
  int run_number = 0, blocks = 0, slot = 0;  // blocks: that have runs of the team; 0: a cluster's
  int32_t new_position = -1;
  RunSteps steps = {};
  DimSoftmax<kHeadDim, kHalves> sums, total;  // of a split, and of a run that the block has alone
  const float scale_log2 = scale * kLog2E;
  // The ring is filled by turns of the same loop (but for the first keys of heads of 256), so that requests have their code once: at few
  // lines a block has more instructions to fetch than keys to read.
#pragma unroll 1
  for (int fills = KvRing<kHeadDim>::kFills;; fills = max(fills - 1, 0)) {
    const bool fills_only = fills > 0;
    if (ring.is_done()) let_next_start();  // the next kernel's weights come behind the keys and values
    if (!fills_only && is_begin) {
      const RunCursor& run = shared.ring.run(run_number);
      if (run_number == 0 && grid.rank_bits > 0) meeting.join();  // not before: the first page was not to wait for it
      if (!run.has_run(grid)) break;
      NewVectors<kHeadDim, kHalves> vectors;
      vectors.prepare(rope, grid, run);
      blocks = share.in_clusters ? 0 : run.runs(share);
      steps = run.steps(grid);
      new_position = run.new_position();
      wait_for_earlier();
      vectors.load();
      vectors.stage(rope, grid, shared);
      __syncthreads();
      is_live = vectors.is_live;
      is_begin = false;
      sums.clear();
    }
    const int32_t crew_at = steps.at + Shape::crew() * kCrewTokens;
    const unsigned new_token = new_position - (crew_at + Shape::crew_warp() * kTileTokens);
    const bool has_step = !fills_only && crew_at < steps.end, has_new = has_step && new_position >= 0 && new_token < kTileTokens;

    if (!fills_only) {
      unsigned char* const keys = shared.ring.slots[slot][Shape::warp()];
      ring.await();
      if (has_new) patch_tile<kHeadDim>(keys, new_token, shared.new_k);
      if (has_step) {
        TileScores scores;
        score_tile(scores, shared, keys);
        weigh_tile(scores, shared.ring.present[slot][Shape::warp()] | (has_new ? 1u << new_token : 0), scale_log2, shared);
      }
      slot = Shape::following(slot);
    }
    __syncwarp();  // all lanes have read the keys and what was `present`
    ring.template refill<true>(grid, share);

    if (!fills_only) {
      ring.await();
      if (has_new) patch_tile<kHeadDim>(shared.ring.slots[slot][Shape::warp()], new_token, shared.new_v);
      sync_crew<kHeadDim>();
      if (has_step) sums.add_step(shared, shared.ring.slots[slot]);
      const int split = steps.split;
      if (steps.advance(Shape::kStepTokens)) {
        CrewMeeting<kHeadDim, kHalves>::join(sums, &shared.ring.slots[slot][0][0]);
        const RunCursor& run = shared.ring.run(run_number);
        const TeamHeads heads = TeamHeads::of(grid, run.team, kHalves * kHalfQueries);
        const RunResults<kHeadDim, kHalves> results = {grid, partials, run, heads, is_live};
        if (Shape::crew() == 0) {
          if (blocks > 1) {
            results.leave(sums, split);
          } else if (blocks == 0) {
            if (!is_live) sums.clear();
            meeting.send(sums, split);
          } else if (split == run.split) {
            total = sums;
          } else {
            total.add(sums);
          }
        }
        is_begin = steps.is_done();
        if (is_begin) {
          unsigned* arrived = partials.arrived + run.index * grid.line_teams.of + run.team;
          if (blocks > 1 && is_last_to_arrive(arrived, blocks, shared.is_last)) {
            results.merge();
          } else if (blocks == 1) {
            results.write(total);
          }
          ++run_number;
        }
        sums.clear();
        __syncthreads();  // all have read the slot and the weights, what crews have handed over, and at the end of a run the queries
      } else {
        sync_crew<kHeadDim>();  // all have read the slot and the weights
      }
      slot = Shape::following(slot);
    }
    ring.template refill<false>(grid, share);
  }
  // A block without work stays until the kernels before have ended, too: to the next one this one's end means that all of them have.
  wait_for_earlier();
  meeting.merge();
  if (share.has_dead) clear_dead_lines<kHeadDim>(grid);
}

template <int kHeadDim, int kHalves>
__global__ void __launch_bounds__(SplitShape<kHeadDim>::kThreads, 2)
    split_attention_kernel(const __grid_constant__ RopeParams rope, const float scale, const __grid_constant__ SplitGrid grid,
                           const __grid_constant__ Partials partials) {
  attend_runs<kHeadDim, kHalves>(rope, scale, grid, partials);
}

Partials partials_in(const FusedAttentionDecodeParams& p) {
  float* sums = p.workspace + workspace_counters(p.workspace_words);
  float* weights = sums + p.lines * p.q_heads * most_splits(p.kv_heads) * p.head_dim;
  return {sums, reinterpret_cast<Weight*>(weights), reinterpret_cast<unsigned*>(p.workspace)};
}

int64_t line_teams(const FusedAttentionDecodeParams& p) { return p.kv_heads * ceil_div(p.q_heads / p.kv_heads, kMaxTeamQueries); }

// Log2 of the blocks of a cluster: as many as each team can have of the device, up to one for each split; 0 where teams are too many, or
// what a block would merge has no room. Two where a multiprocessor has two blocks: larger clusters would not fill the device, and its last
// ones would begin when others end. One that finds no place begins when the kernel before ends.
template <int kHeadDim, int kHalves>
int rank_bits(const FusedAttentionDecodeParams& p, int64_t blocks) {
  const int64_t teams = p.lines * line_teams(p);
  int bits = p.lines > kFewLines ? 1 : 3;
  static_assert(kFewSplits == 1 << 3);
  while (bits > 0 && teams << bits > (bits > 1 ? blocks - blocks / kUnfilled : blocks)) --bits;
  const int64_t queries = std::min<int64_t>(p.q_heads / p.kv_heads, kHalves * kHalfQueries);
  return can_meet<kHeadDim, kHalves>(queries, 1 << bits) ? bits : 0;
}

template <int kHeadDim, int kHalves>
int launch_split(const FusedAttentionDecodeParams& p, void* stream) {
  static_assert(sizeof(SplitShared<kHeadDim, kHalves>) <= kSmallerBlock);
  const int64_t group = p.q_heads / p.kv_heads;
  const int64_t blocks = multiprocessors() * (p.lines > kFewLines ? 2 : 1);
  const int bits = rank_bits<kHeadDim, kHalves>(p, blocks);
  const SplitGrid grid{p.decode_meta,
                       static_cast<int>(p.lines),
                       static_cast<int>(p.q_heads),
                       static_cast<int>(group),
                       Divisor(line_teams(p)),
                       Divisor(line_teams(p) / p.kv_heads),
                       Divisor(most_splits(p.kv_heads)),
                       Divisor(blocks >> bits << bits),
                       Divisor(ceil_div(kHeadDim / kPieceDims, int64_t{1} << bits)),
                       bits,
                       SplitShape<kHeadDim>::kUnitBits,
                       SplitCache(p.cache),
                       {static_cast<const Bf16*>(p.q), p.q_line_stride, p.q_head_stride},
                       {static_cast<const Bf16*>(p.k), p.k_line_stride, p.k_head_stride},
                       {static_cast<const Bf16*>(p.v), p.v_line_stride, p.v_head_stride},
                       {static_cast<Bf16*>(p.out), p.out_line_stride, p.out_head_stride}};
  LaunchShape shape{blocks >> bits << bits, SplitShape<kHeadDim>::kThreads};
  shape.cluster = 1u << bits;
  shape.shared_bytes = kSmallerBlock;
  shape.early = p.early;
  return launch(split_attention_kernel<kHeadDim, kHalves>, shape, stream, p.rope, p.scale, grid, partials_in(p));
}

template <int kHeadDim>
int launch_halves(const FusedAttentionDecodeParams& p, void* stream) {
  return p.q_heads > kHalfQueries * p.kv_heads ? launch_split<kHeadDim, 2>(p, stream) : launch_split<kHeadDim, 1>(p, stream);
}

// Indices in the kernel are of 32 bits: vectors of 16 bytes in the cache, positions of a row, strides, teams and units of all lines.
bool fits_indices(const FusedAttentionDecodeParams& p) {
  const int64_t strides[] = {p.q_line_stride, p.q_head_stride, p.k_line_stride,   p.k_head_stride,
                             p.v_line_stride, p.v_head_stride, p.out_line_stride, p.out_head_stride};
  for (const int64_t stride : strides) {
    if (stride > INT32_MAX) return false;
  }
  const int64_t units = ceil_div(SplitCache::capacity_of(p.cache), kCrewTokens);
  return SplitCache::fits(p.cache, p.kv_heads) && p.lines * p.q_heads < INT32_MAX / kMaxSplits &&
         p.lines * p.q_heads * units < INT32_MAX / 2;
}

}  // namespace

bool can_split_attention(const FusedAttentionDecodeParams& p) {
  const bool fits_tiles = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  return p.dtype == DType::kBF16 && fits_tiles && p.workspace != nullptr && is_vector_aligned(p.workspace) &&
         is_vector_aligned(p.rope.cos) && is_vector_aligned(p.rope.sin) && is_vector_aligned(p.rope.q_norm) &&
         is_vector_aligned(p.rope.k_norm) && can_use_vectors(p.cache, p.head_dim, p.dtype) && is_vector_aligned(p.out) &&
         are_whole_vectors(p.dtype, p.out_line_stride, p.out_head_stride) && fits_indices(p) && fast_kernels_run();
}

int split_attention(const FusedAttentionDecodeParams& p, void* stream) {
  if (p.lines == 0 || p.q_heads == 0) return 0;
  switch (p.head_dim) {
    case 64:
      return launch_halves<64>(p, stream);
    case 96:
      return launch_halves<96>(p, stream);
    case 128:
      return launch_halves<128>(p, stream);
    default:
      return launch_halves<256>(p, stream);
  }
}

}  // namespace photon::cuda
