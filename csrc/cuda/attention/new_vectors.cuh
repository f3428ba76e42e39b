// The token's new vectors in split attention: its queries, and its key and value where the tile
// range has the new position. The warps take the queries by turns; the last warp also takes the new
// key, and the one before it the new value.
#pragma once
#include "cuda/attention/rotate.cuh"
#include "cuda/attention/split_attention.cuh"

namespace photon::cuda {

template <typename Shape, int kHalves>
struct NewVectors {
  using Kv = typename Shape::Kv;
  using Grid = typename Kv::Grid;
  using Shared = SplitShared<Shape, kHalves>;
  static constexpr int kWarps = Shape::kWarps;
  static constexpr int kWarpQueries = kHalves * kHalfQueries / kWarps;

  SplitGroupHeads heads;
  bool is_live;   // the token has a place and angles, else it comes to nothing
  bool owns_new;  // this warp has the new key or value
  bool writes;    // it also goes to the cache
  typename Grid::Places own;
  const Bf16 *query_at, *own_at;
  int head_stride;
  LaneCosSin angles;
  LanePairs<Bf16> query_norm, key_norm;
  LanePairs<Bf16> vectors[kWarpQueries + 1];  // the last one: the new key or value

  // Takes up a tile range, from what no kernel of the chain writes: see split_kernel.cuh.
  __device__ void prepare(const RopeParams& rope, const Grid& grid, const RangeCursor& range) {
    heads = SplitGroupHeads::of(grid, range.split_group, kHalves * kHalfQueries);
    const bool can_be = can_rotate(rope, range.token);
    const int32_t page = grid.cache.request(grid.cache.pages_of(range.token.row), range.token.row,
                                            range.token.position, can_be);
    if (can_be) angles = LaneCosSin::load(rope, range.token.position, Shape::kHeadDim);
    query_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.q_norm), Shape::kHeadDim,
                                       rope.q_norm != nullptr);
    key_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.k_norm), Shape::kHeadDim,
                                     rope.k_norm != nullptr);
    // A new position beyond the context is not attended to; the tile range that has the context's
    // last position appends it.
    const int32_t owned = range.new_position() >= 0 ? range.new_position() : range.length - 1;
    own = grid.places(page, heads.kv_head, range.token.position);
    is_live = own.k != kAbsent;
    owns_new = is_live && owned >= range.begin_position(grid) && owned < range.end_position(grid) &&
               Shape::warp() >= kWarps - 2;
    writes = heads.leads(grid);
    head_stride = grid.q.head_stride;
    query_at = computed_now(grid.q.at(range.index, heads.first + Shape::warp()));
    own_at = computed_now(is_key() ? grid.k.at(range.index, heads.kv_head)
                                   : grid.v.at(range.index, heads.kv_head));
  }

  // Requests them, after wait_for_earlier(), because the kernel before this one writes them. Why
  // plain loads are right: the wait returns when all that the kernels before have written is
  // visible to this grid; and it is a memory barrier for the compiler, which therefore moves no
  // load above it, and takes none through the read-only cache, since this kernel writes global
  // memory, too (tests/test_portable_code.py looks at the PTX). Loads past L1, which were tried,
  // make kernels for heads of 64 spill more registers.
  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kWarpQueries; ++i) {
      const Bf16* at = query_at + static_cast<int64_t>(head_stride) * (i * kWarps);
      vectors[i] =
          LanePairs<Bf16>::load(at, Shape::kHeadDim, Shape::warp() + i * kWarps < heads.count);
    }
    vectors[kWarpQueries] = LanePairs<Bf16>::load(own_at, Shape::kHeadDim, owns_new);
  }

  // Rotated queries to shared memory, and the new key and value, there and (by one split-KV group
  // of the KV head) into the cache. No CTA reads them back from there.
  __device__ void stage(const RopeParams& rope, const Grid& grid, Shared& shared) {
#pragma unroll 1
    for (int i = following(-1); i <= kWarpQueries; i = following(i)) {
      const bool is_own = i == kWarpQueries;
      LanePairs<Bf16> v = vectors[0], norm = query_norm;
#pragma unroll
      for (int j = 1; j <= kWarpQueries; ++j) v.replace_if(i == j, vectors[j]);
      norm.replace_if(is_own, key_norm);
      if (!is_own || is_key()) {
        const bool normed = (is_own ? rope.k_norm : rope.q_norm) != nullptr;
        v = rotate_pairs(v, normed, norm, angles, rope.eps, Shape::kHeadDim);
      }
      if (is_own) {
        store_own(v, grid, shared);
      } else {
        store_query(v, Shape::warp() + i * kWarps, shared);
      }
    }
  }

 private:
  // The new key or value, as it will be read from the cache.
  __device__ void store_own(const LanePairs<Bf16>& v, const Grid& grid, Shared& shared) const {
    using Element = typename Kv::Element;
    Element* const to = is_key() ? shared.new_k : shared.new_v;
    Element* const cache = reinterpret_cast<Element*>(is_key() ? grid.cache.k : grid.cache.v) +
                           static_cast<size_t>(is_key() ? own.k : own.v) * Kv::kVector;
    if constexpr (Kv::kIsScaled) {
      float* const scale = grid.scales.base + own.scale + (is_key() ? 0 : grid.scales.values);
      stage_new(v, Shape::kHeadDim, to, is_key() ? &shared.new_k_scale : &shared.new_v_scale,
                writes ? cache : nullptr, scale);
    } else {
      v.store(to, Shape::kHeadDim);
      if (writes) v.store(cache, Shape::kHeadDim);
    }
  }

  __device__ static void store_query(const LanePairs<Bf16>& v, int query, Shared& shared) {
    using Operand = typename Kv::Operand;
    const int lane = threadIdx.x % kWarpSize;  // its elements are whole fragments apart
    Operand* first = reinterpret_cast<Operand*>(
                         shared.queries.word(query, lane / 16, Kv::query_column(lane % 16))) +
                     lane % 2;
    const auto store = [&](int d, Operand e) {
      first[(d - lane) / 16 * (sizeof(shared.queries.at[0]) / sizeof(Operand))] = e;
    };
    if constexpr (Kv::kIsScaled) {
      const auto most = BinaryScale::of(largest_magnitude(v, Shape::kHeadDim));
      if (lane == 0) shared.query_scales[query] = most.scale;
      v.for_elements(Shape::kHeadDim, [&](int d, Bf16 e) {
        store(d, from_float<Operand>(to_float(e) * most.inverse));
      });
    } else {
      v.for_elements(Shape::kHeadDim, store);
    }
  }

  // The next one of this warp's vectors that there is.
  __device__ int following(int i) const {
    if (++i < kWarpQueries && Shape::warp() + i * kWarps < heads.count) return i;
    return i <= kWarpQueries && owns_new ? kWarpQueries : kWarpQueries + 1;
  }

  __device__ static bool is_key() { return Shape::warp() == kWarps - 1; }
};

}  // namespace photon::cuda
