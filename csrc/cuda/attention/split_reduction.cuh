// Reduction of a split-KV group's splits in its cluster. Each CTA merges some dims of the result.
// The CTA that has computed a split sends it to the others' shared memory, to each the dims that it
// merges.
#pragma once
#include "cuda/attention/split_attention.cuh"

namespace photon::cuda {

// The CTAs take the dims by turns, in pieces of 8, as matrix instructions leave them.
constexpr int kPieceDims = 8, kPiecePairs = kPieceDims / 2;

// Whether a CTA has a place, and a thread, for each pair of sums that it merges.
template <typename Shape, int kHalves>
bool can_reduce_in_cluster(int64_t queries, int ranks) {
  return queries * ceil_div(Shape::kHeadDim / kPieceDims, ranks) * kPiecePairs <=
         SplitShared<Shape, kHalves>::kReductionPlaces;
}

template <typename Shape, int kHalves>
struct ClusterReduction {
  using Sums = DimSoftmax<Shape, kHalves>;
  using Shared = SplitShared<Shape, kHalves>;
  static constexpr int kPieces = Shape::kHeadDim / kPieceDims;
  static_assert(kPieces >=
                kFewSplits);  // every CTA merges something, and so stays until all has arrived

  const SplitGrid& grid;
  Shared& shared;
  int token, splits, first_head, queries;  // queries: 0 where there is nothing to reduce

  __device__ ClusterReduction(const SplitGrid& grid, const CtaSplits& cta_splits,
                              const RangeCursor& range, Shared& shared)
      : grid(grid), shared(shared) {
    const bool reduces = cta_splits.in_clusters && range.index < grid.tokens && range.length > 0;
    const SplitGroupHeads heads =
        SplitGroupHeads::of(grid, range.split_group, kHalves * kHalfQueries);
    token = range.index;
    splits = range.cut.splits;
    first_head = heads.first;
    queries = reduces ? heads.count : 0;
  }

  // Both come before anybody sends. All threads of the cluster must call open(), then join().
  __device__ void open() const {
    if (threadIdx.x == 0) {
      init_barrier(&shared.reduction.arrived, 1);
      fence_barriers();
      arrive_expecting(&shared.reduction.arrived, splits_bytes());
    }
    __syncwarp();
    enter_cluster();
  }
  __device__ static void join() { meet_cluster(); }

  // One split's sums.
  __device__ void send(const Sums& sums, int split) const {
    if (!Sums::has_dims()) return;
    using Kv = typename Shape::Kv;
#pragma unroll
    for (int part = 0; part < Sums::kParts; ++part) {
      const int query = Sums::query(part);
      if (query >= queries) continue;
      const auto& own = sums.parts[part];
#pragma unroll
      for (int i = 0; i < Sums::kPieces; ++i) {
        const int piece = Sums::first_dim() / kPieceDims + i * (Kv::kPieceDims / kPieceDims) +
                          Kv::peer(lane_id()) / kPiecePairs;
        float2* place =
            &shared.reduction
                 .sums[split]
                      [(query * grid.rank_pieces.of + (piece >> grid.rank_bits)) * kPiecePairs +
                       Kv::peer(lane_id()) % kPiecePairs];
        send_to_block(&place->x, piece & (grid.ranks() - 1), own.sum[2 * i], own.sum[2 * i + 1],
                      &shared.reduction.arrived);
      }
      const int to =
          Shape::warp_group_warp() * Kv::kPeers +
          Kv::peer(
              lane_id());  // all lanes of a query have the weight, and each sends it to one CTA
      if (to < grid.ranks()) {
        send_to_block(&shared.reduction.weights[split][query].high, to, own.weight.high,
                      own.weight.sum, &shared.reduction.arrived);
      }
    }
  }

  // Merges the splits in order and writes what they come to.
  __device__ void merge() const {
    const unsigned row = threadIdx.x / kPiecePairs, own_query = grid.rank_pieces.divides(row);
    const int own_piece = static_cast<int>(
        (row - own_query * grid.rank_pieces.of) << grid.rank_bits | cluster_rank());
    if (static_cast<int>(own_query) >= queries || own_piece >= kPieces) return;
    Bf16* out = grid.out.at(token, first_head + own_query) + own_piece * kPieceDims +
                2 * (threadIdx.x % kPiecePairs);
    wait_barrier(&shared.reduction.arrived, 0);
    PartSoftmax<2> total = sent(own_query, 0);
#pragma unroll 1
    for (int split = 1; split < splits; ++split) total.add(sent(own_query, split));
    const float share = total.weight.sum == 0.0f ? 0.0f : 1.0f / total.weight.sum;
    *reinterpret_cast<uint32_t*>(out) = pack_bf16(share * total.sum[0], share * total.sum[1]);
  }

 private:
  __device__ uint32_t splits_bytes() const {
    const int pieces = grid.each_rank(kPieces - static_cast<int>(cluster_rank()));
    return queries * splits *
           (pieces * kPieceDims * static_cast<int>(sizeof(float)) +
            static_cast<int>(sizeof(Weight)));
  }

  // What has arrived of a split.
  __device__ PartSoftmax<2> sent(unsigned own_query, int split) const {
    const float2 sums = shared.reduction.sums[split][threadIdx.x];
    return {shared.reduction.weights[split][own_query], {sums.x, sums.y}};
  }
};

}  // namespace photon::cuda
