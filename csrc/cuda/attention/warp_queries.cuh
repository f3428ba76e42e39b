// The queries of a lone warp's tile range, and the new key and value: norm, rotation, and their
// places.
#pragma once
#include "cuda/attention/rotate.cuh"
#include "cuda/attention/warp_tiles.cuh"

namespace photon::cuda {

// A tile range's rotated queries, as a lane holds them for matrix instructions: query g, columns
// 2t, 2t + 1, 2t + 8 and 2t + 9 of each fragment.
template <int kHeadDim>
struct WarpQueries {
  using Shape = WarpShape<kHeadDim>;
  using Shared = WarpShared<kHeadDim>;

  uint32_t at[Shape::kFragments][2];

  // Norm and rotation; and the new key and value into the cache, where the tile range has the
  // context's last position (see NewVectors). Returns whether the token has a place and angles.
  __device__ bool prepare(const RopeParams& rope, const SplitGrid& grid, const RangeCursor& range,
                          Shared& shared) {
    const SplitGroupHeads heads = SplitGroupHeads::of(grid, range.split_group, kHalfQueries);
    const bool can_be = can_rotate(rope, range.token);
    const int32_t page = grid.cache.request(grid.cache.pages_of(range.token.row), range.token.row,
                                            range.token.position, can_be);
    LaneCosSin angles;
    if (can_be) angles = LaneCosSin::load(rope, range.token.position, kHeadDim);
    const auto query_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.q_norm), kHeadDim,
                                                  rope.q_norm != nullptr);
    const auto key_norm = LanePairs<Bf16>::load(static_cast<const Bf16*>(rope.k_norm), kHeadDim,
                                                rope.k_norm != nullptr);
    const int32_t owned = range.new_position() >= 0 ? range.new_position() : range.length - 1;
    const KvPlaces own = grid.cache.places(page, heads.kv_head, range.token.position);
    const bool is_live = own.k != kAbsent;
    const bool owns_new =
        is_live && owned >= range.begin_position(grid) && owned < range.end_position(grid);
    wait_for_earlier();
    const int vectors = heads.count + (owns_new ? 2 : 0);  // the key and the value come last
    LanePairs<Bf16> loaded[Shared::kQueries + 2];
#pragma unroll
    for (int j = 0; j < Shared::kQueries + 2; ++j) {
      const int i = j - heads.count;
      const Bf16* vector = i < 0    ? grid.q.at(range.index, heads.first + j)
                           : i == 0 ? grid.k.at(range.index, heads.kv_head)
                                    : grid.v.at(range.index, heads.kv_head);
      loaded[j] = LanePairs<Bf16>::load(vector, kHeadDim, j < vectors);
    }
#pragma unroll 1
    for (int j = 0; j < vectors; ++j) {
      const int i = j - heads.count;
      LanePairs<Bf16> v = loaded[0], norm = query_norm;
#pragma unroll
      for (int other = 1; other < Shared::kQueries + 2; ++other)
        v.replace_if(other == j, loaded[other]);
      norm.replace_if(i >= 0, key_norm);
      const bool normed = (i >= 0 ? rope.k_norm : rope.q_norm) != nullptr;
      if (i <= 0) v = rotate_pairs(v, normed, norm, angles, rope.eps, kHeadDim);
      v.store(i < 0 ? shared.queries[j] : i == 0 ? shared.new_k : shared.new_v, kHeadDim);
      if (i >= 0) {
        v.store((i == 0 ? grid.cache.k : grid.cache.v) +
                    static_cast<size_t>(i == 0 ? own.k : own.v) * kPack,
                kHeadDim);
      }
    }
    __syncwarp();
    take(shared, heads.count);
    __syncwarp();
    return is_live;
  }

 private:
  // Rows without a query get the last one.
  __device__ void take(const Shared& shared, int queries) {
    const LaneId lane = lane_id();
    const Bf16* row = shared.queries[min(lane.g, queries - 1)] + 2 * lane.t;
#pragma unroll
    for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        at[fragment][i] = *reinterpret_cast<const uint32_t*>(row + fragment * 16 + 8 * i);
    }
  }
};

}  // namespace photon::cuda
