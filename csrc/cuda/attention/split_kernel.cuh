// fused_attention_decode for Hopper and later: a token's context is cut into splits that depend on
// its length alone (common/kv_split.h). A CTA takes tile ranges of them (split_work.cuh), about as
// many positions as every other CTA. Where several CTAs have splits of a token, the last of them to
// finish merges the splits in order; or where split-KV groups are few and contexts short, these
// CTAs are a cluster, and the splits are reduced in its shared memory (split_reduction.cuh). So one
// token keeps the whole device busy, many tokens are merged no more often than they must be, and a
// token's bits are the same in every step (but see batch_sums.cuh). After flash-decoding (Dao et
// al., 2023).
//
// It is a kernel of a chain. Before wait_for_earlier() it reads decode_meta, the page table, the
// cos/sin cache, the norms' weights and old positions of the KV cache, as many as its ring holds
// (split_ring.cuh). With few tokens and short contexts these are all positions that it reads.
//
// Why plain loads of decode_meta and the page table are right before the wait. They are written by
// kernels that do not let the next one start (begin_step, decode_meta_set, and balanced_plan, whose
// plan balanced attention reads so), or by the caller's own, which do not either. So no kernel
// begins before they are complete, and every kernel of the chain begins after that one has ended. A
// line of them in an SM's L1 was therefore brought there when they were complete, or by a kernel
// before that one, whose lines are dropped when a kernel begins on an idle device. Nobody writes
// them while the chain runs, so that the compiler may keep what it has read across the wait. Scales
// of old positions in fp8, which come through L1, are there from the steps before; what a step
// writes beside them nobody reads before the next one's decode_meta is written. tests/emulator
// finds a kernel that breaks this rule: one that reads, before it waits, what a kernel that may
// still run writes.
#pragma once
#include "common/attention_plan.h"
#include "cuda/attention/new_vectors.cuh"
#include "cuda/attention/split_attention.cuh"
#include "cuda/attention/split_launch.cuh"
#include "cuda/attention/split_reduction.cuh"
#include "cuda/residency.cuh"
#include "cuda/stamps.cuh"

namespace photon::cuda {

constexpr int64_t kOneCtaTokens =
    8;  // up to these an SM has one CTA; beyond, two hide each other's waits
constexpr int kLoneTokens = 2;  // whose keys and values are requested in a moment, so that the next
                                // kernel need not come behind them
constexpr int64_t kUnfilled =
    16;  // of so many SMs clusters of 4 and 8 leave one: of 4 CTAs 31 fit on an H200, of 8 15
constexpr int kMergedAtOnce = 4;  // splits in flight
constexpr int kSlackTokens = 128;

// The result of a tile range, as the CTA's threads hold it, and where it goes.
template <typename Shape, int kHalves>
struct RangeResults {
  using Sums = DimSoftmax<Shape, kHalves>;
  using Part = typename Sums::Part;

  const SplitGrid& grid;
  const Partials& partials;
  const RangeCursor& range;
  SplitGroupHeads heads;
  bool is_live;  // else the token is zeros

  // body(part, query head of the token) for those of this lane's queries that there are.
  template <typename Body>
  __device__ void for_queries(const Body& body) const {
    if (!Sums::has_dims()) return;
#pragma unroll
    for (int part = 0; part < Sums::kParts; ++part) {
      const int query = Sums::query(part);
      if (query < heads.count) body(part, heads.first + query);
    }
  }

  __device__ int64_t partial_at(int head, int split) const {
    return (static_cast<int64_t>(range.index) * grid.q_heads + head) * grid.splits.of + split;
  }

  // The split-KV group's result, which the first warp group has.
  __device__ void write(const Sums& sums) const {
    if (Shape::warp_group() > 0) return;
    for_queries([&](int i, int head) {
      const Part& part = sums.parts[i];
      const float share = share_of(part.weight);
      Bf16* out = grid.out.at(range.index, head);
#pragma unroll
      for (int piece = 0; piece < Sums::kPieces; ++piece) {
        const uint32_t pair =
            pack_bf16(share * part.sum[2 * piece], share * part.sum[2 * piece + 1]);
        *reinterpret_cast<uint32_t*>(out + Sums::dim(piece)) = is_live ? pair : 0;
      }
    });
  }

  // Leaves one split's result for the CTA that merges.
  __device__ void leave(const Sums& sums, int split) const {
    for_queries([&](int i, int head) {
      const Part& part = sums.parts[i];
      const int64_t at = partial_at(head, split);
#pragma unroll
      for (int piece = 0; piece < Sums::kPieces; ++piece) {
        *reinterpret_cast<float2*>(partials.sums + at * Shape::kHeadDim + Sums::dim(piece)) = {
            part.sum[2 * piece], part.sum[2 * piece + 1]};
      }
      if (Sums::dim(0) == 0) partials.weights[at] = part.weight;
    });
  }

  // Merges the splits in order, by the first warp group. What it reads was written by the first
  // warp groups of all CTAs, before is_last_to_arrive().
  __device__ void merge() const {
    if (Shape::warp_group() > 0) return;
    Sums sums;
    for_queries([&](int part, int head) {
      Part& total = sums.parts[part];
#pragma unroll 1
      for (int from = 0; from < range.cut.splits; from += kMergedAtOnce) {
        Part parts[kMergedAtOnce];
#pragma unroll
        for (int j = 0; j < kMergedAtOnce; ++j)
          parts[j] = left(head, min(from + j, range.cut.splits - 1));
        if (from == 0) {
          total = parts[0];
        } else {
          total.add(parts[0]);
        }
#pragma unroll
        for (int j = 1; j < kMergedAtOnce; ++j) {
          if (from + j < range.cut.splits) total.add(parts[j]);
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
      const float2 pair =
          *reinterpret_cast<const float2*>(partials.sums + at * Shape::kHeadDim + Sums::dim(piece));
      part.sum[2 * piece] = pair.x;
      part.sum[2 * piece + 1] = pair.y;
    }
    return part;
  }
};

// Adds up what a CTA's warp groups have summed of a split, in order: the other warp groups hand
// their sums over to the first one, in shared memory. The calling warp must be done with `slot`.
// All threads must call it, and a barrier of the CTA must follow.
template <typename Shape, int kHalves>
struct WarpGroupReduction {
  using Sums = DimSoftmax<Shape, kHalves>;
  static constexpr int kFloats = sizeof(Sums) / sizeof(float);
  using WarpGroup = float[kFloats][Shape::kWarpGroupThreads];
  static_assert(sizeof(WarpGroup) <= Shape::kSlotBytes / Shape::kWarpGroups);

  __device__ static void join(Sums& sums, unsigned char* slot) {
    if constexpr (Shape::kWarpGroups == 1) return;
    sync_warp_group<Shape>();
    if (Shape::warp_group() > 0) hand_over(sums, warp_group_part(slot, Shape::warp_group()));
    __syncthreads();
    if (Shape::warp_group() > 0) return;
#pragma unroll
    for (int other = 1; other < Shape::kWarpGroups; ++other)
      sums.add(handed_over(warp_group_part(slot, other)));
  }

 private:
  __device__ static WarpGroup& warp_group_part(unsigned char* slot, int warp_group) {
    return *reinterpret_cast<WarpGroup*>(slot +
                                         warp_group * (Shape::kSlotBytes / Shape::kWarpGroups));
  }

  __device__ static void hand_over(const Sums& own, WarpGroup& to) {
    const float* floats = reinterpret_cast<const float*>(&own);
#pragma unroll
    for (int i = 0; i < kFloats; ++i) to[i][threadIdx.x % Shape::kWarpGroupThreads] = floats[i];
  }

  __device__ static Sums handed_over(const WarpGroup& from) {
    Sums sums;
    float* floats = reinterpret_cast<float*>(&sums);
#pragma unroll
    for (int i = 0; i < kFloats; ++i) floats[i] = from[i][threadIdx.x % Shape::kWarpGroupThreads];
    return sums;
  }
};

// Whether this CTA is the last of its split-KV group to arrive. If so, it sees what all of them
// have written. All threads must call it, after writing.
__device__ inline bool is_last_to_arrive(unsigned* arrived, int blocks, bool& shared_answer) {
  const unsigned last = static_cast<unsigned>(blocks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) shared_answer = count_round(arrived, last) == last;
  __syncthreads();
  return shared_answer;
}

// Puts the new key (or value) into its row of the warp's tile.
template <typename Shape>
__device__ void patch_tile(unsigned char* tile, int token, const typename Shape::Kv::Element* row) {
  const int vector = threadIdx.x % kWarpSize;
  if (vector < Shape::kVectors) {
    *reinterpret_cast<uint4*>(tile + Shape::place(token, vector)) =
        reinterpret_cast<const uint4*>(row)[vector];
  }
  __syncwarp();
}

// The scales of both, where the new key goes into the tile of this slot.
template <typename Shape, int kHalves>
__device__ void patch_scales(SplitShared<Shape, kHalves>& shared, int slot, int token) {
  if constexpr (Shape::Kv::kIsScaled) {
    auto& scales = shared.ring.scales[slot][Shape::warp()];
    if (threadIdx.x % kWarpSize == 0) {
      scales.keys[token] = shared.new_k_scale;
      scales.values[token] = shared.new_v_scale;
    }
  }
}

// A CTA's tile ranges, in one loop over all of them, so that there is one copy of the code.
template <typename Shape, int kHalves, bool kMany>
__device__ void attend_ranges(const RopeParams& rope, float scale,
                              const typename Shape::Kv::Grid& grid, const Partials& partials) {
  using Ring = KvRing<Shape, kMany>;
  const Stamps stamps(StampedKernel::kAttention, grid.q_heads, Shape::kHeadDim);
  SplitShared<Shape, kHalves>& shared =
      *reinterpret_cast<SplitShared<Shape, kHalves>*>(dynamic_shared());
  if (grid.tokens <= kLoneTokens) let_next_start();
  TokenCut own;
  const CtaSplits computed = CtaSplits::of_cta<kMany>(grid, own);
  CtaRanges<kMany>::make_order(grid, computed, shared.reduction.order);
  const RangeCursor first = CtaRanges<kMany>(grid, computed, shared.reduction.order).first(own);
  const CtaSplits& cta_splits =
      kMany ? computed.kept_in(shared.cta_splits[Shape::warp()]) : computed;
  const CtaRanges<kMany> ranges(grid, cta_splits, shared.reduction.order);
  const ClusterReduction<Shape, kHalves> reduction(grid, cta_splits, first, shared);
  if (grid.rank_bits > 0) reduction.open();
  Ring ring(grid, ranges, first, shared.ring);
  bool is_live = false, is_begin = true;
  int range_number = 0, blocks = 0,
      slot = 0;  // blocks: CTAs that have tile ranges of the split-KV group; 0: a cluster's
  int32_t new_position = -1;
  RangeSteps steps = {};
  DimSoftmax<Shape, kHalves> sums,
      total;  // of a split, and of a tile range that the CTA has alone
  const float scale_log2 = scale * kLog2E;
  // The first turns of the same loop fill the ring (but for the first keys of heads of 256), so
  // that there is one copy of the code that requests: at few tokens a CTA has more instructions to
  // fetch than keys to read.
#pragma unroll 1
  for (int fills = Ring::kFills;; fills = max(fills - 1, 0)) {
    const bool fills_only = fills > 0;
    if (ring.is_done())
      let_next_start();  // the next kernel's weights come behind the keys and values
    if (!fills_only && is_begin) {
      const RangeCursor& range = shared.ring.range(range_number);
      if (range_number == 0 && grid.rank_bits > 0)
        reduction.join();  // not before: the first page was not to wait for it
      if (!range.has_range(grid)) break;
      NewVectors<Shape, kHalves> vectors;
      vectors.prepare(rope, grid, range);
      blocks = cta_splits.in_clusters ? 0 : ranges.ranges_of(range);
      steps = range.steps(grid);
      new_position = range.new_position();
      wait_for_earlier();
      if (range_number == 0) stamps.at(Point::kWaited);
      vectors.load();
      vectors.stage(rope, grid, shared);
      __syncthreads();
      if (range_number == 0) stamps.at(Point::kLoaded);
      is_live = vectors.is_live;
      is_begin = false;
      sums.clear();
    }
    const int32_t warp_group_at = steps.at + Shape::warp_group() * Shape::kWarpGroupTokens;
    const unsigned new_token =
        new_position - (warp_group_at + Shape::warp_group_warp() * Shape::kTileTokens);
    const bool has_step = !fills_only && warp_group_at < steps.end,
               has_new = has_step && new_position >= 0 && new_token < Shape::kTileTokens;

    if (!fills_only) {
      unsigned char* const keys = shared.ring.slots[slot][Shape::warp()];
      ring.await();
      if (has_new) {
        patch_scales(shared, slot, new_token);
        patch_tile<Shape>(keys, new_token, shared.new_k);
      }
      if (has_step) {
        typename Shape::Kv::template Scores<kHalves> scores;
        Shape::Kv::template score<Shape>(scores, shared.queries, keys);
        weigh_tile(scores,
                   shared.ring.present[slot][Shape::warp()] | (has_new ? 1u << new_token : 0),
                   TileFactors<Shape, kHalves>(scale_log2, shared, slot), shared);
      }
      slot = Shape::following(slot);
    }
    __syncwarp();  // all lanes have read the keys and what was `present`
    ring.template refill<true>(grid);

    if (!fills_only) {
      ring.await();
      if (has_new)
        patch_tile<Shape>(shared.ring.slots[slot][Shape::warp()], new_token, shared.new_v);
      sync_warp_group<Shape>();
      if (has_step) sums.add_step(shared, shared.ring.slots[slot]);
      const int split = steps.split;
      if (steps.advance(Shape::kStepTokens)) {
        WarpGroupReduction<Shape, kHalves>::join(sums, &shared.ring.slots[slot][0][0]);
        const RangeCursor& range = shared.ring.range(range_number);
        const SplitGroupHeads heads =
            SplitGroupHeads::of(grid, range.split_group, kHalves * kHalfQueries);
        const RangeResults<Shape, kHalves> results = {grid, partials, range, heads, is_live};
        if (Shape::warp_group() == 0) {
          if (blocks > 1) {
            results.leave(sums, split);
          } else if (blocks == 0) {
            if (!is_live) sums.clear();
            reduction.send(sums, split);
          } else if (split == range.split) {
            total = sums;
          } else {
            total.add(sums);
          }
        }
        is_begin = steps.is_done();
        if (is_begin) {
          unsigned* arrived =
              partials.arrived + range.index * grid.token_split_groups.of + range.split_group;
          if (blocks > 1 && is_last_to_arrive(arrived, blocks, shared.is_last)) {
            results.merge();
          } else if (blocks == 1) {
            results.write(total);
          }
          ++range_number;
        }
        sums.clear();
        __syncthreads();  // all have read the slot and the weights, what warp groups have handed
                          // over, and at the end of a tile range the queries
      } else {
        sync_warp_group<Shape>();  // all have read the slot and the weights
      }
      slot = Shape::following(slot);
    }
    ring.template refill<false>(grid);
  }
  stamps.at(Point::kSummed);
  // A CTA without work waits for the kernels before, too, because the next kernel takes this one's
  // end for the end of all of them.
  wait_for_earlier();
  reduction.merge();
  if (cta_splits.has_dead) clear_dead_tokens<Shape::kHeadDim>(grid);
  stamps.at(Point::kStored);
}

template <typename Shape, int kHalves, bool kMany>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    split_attention_kernel(const __grid_constant__ RopeParams rope, const float scale,
                           const __grid_constant__ typename Shape::Kv::Grid grid,
                           const __grid_constant__ Partials partials) {
  attend_ranges<Shape, kHalves, kMany>(rope, scale, grid, partials);
}

// Log2 of the CTAs of a cluster: as many as the device has for each split-KV group, up to one for
// each split; 0 where split-KV groups are too many, or where a CTA has no room for what it would
// merge. At most two CTAs where an SM has two: larger clusters would not fill the device, and the
// last of them would begin when others end. A cluster that finds no place begins when the kernel
// before ends.
template <typename Shape, int kHalves>
int rank_bits(const FusedAttentionDecodeParams& p, int64_t blocks) {
  const int64_t split_groups = p.tokens * token_split_groups(p);
  int bits = p.tokens > kOneCtaTokens ? 1 : 3;
  static_assert(kFewSplits == 1 << 3);
  while (bits > 0 && split_groups << bits > (bits > 1 ? blocks - blocks / kUnfilled : blocks))
    --bits;
  const int64_t queries = std::min<int64_t>(p.q_heads / p.kv_heads, kHalves * kHalfQueries);
  return can_reduce_in_cluster<Shape, kHalves>(queries, 1 << bits) ? bits : 0;
}

template <typename Shape, int kHalves>
int launch_split(const FusedAttentionDecodeParams& p, void* stream) {
  static_assert(sizeof(SplitShared<Shape, kHalves>) <= kSmallerBlock);
  const int64_t blocks = sms() * (p.tokens > kOneCtaTokens ? 2 : 1);
  const int bits = rank_bits<Shape, kHalves>(p, blocks);
  LaunchShape shape{blocks >> bits << bits, Shape::kThreads};
  shape.cluster = 1u << bits;
  shape.shared_bytes = kSmallerBlock;
  shape.pdl = p.pdl;
  const Division division = {shape.blocks, bits,
                             ceil_div(Shape::kHeadDim / kPieceDims, int64_t{1} << bits),
                             Shape::kItemBits, kSlackTokens};
  const auto kernel = p.tokens > kWarpSize ? split_attention_kernel<Shape, kHalves, true>
                                           : split_attention_kernel<Shape, kHalves, false>;
  return launch(kernel, shape, stream, p.rope, p.scale,
                Shape::Kv::grid_of(p, make_split_grid(p, division)), partials_in(p));
}

template <typename Shape>
int launch_halves(const FusedAttentionDecodeParams& p, void* stream) {
  static_assert(Shape::kWarpGroupTokens >= kSplitItemTokens);
  return p.q_heads > kHalfQueries * p.kv_heads ? launch_split<Shape, 2>(p, stream)
                                               : launch_split<Shape, 1>(p, stream);
}

}  // namespace photon::cuda
