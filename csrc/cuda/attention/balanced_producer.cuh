// The producer of a CTA of balanced_attention: which partial tiles the CTA computes, one after the
// other, and what is copied for them.
#pragma once
#include "cuda/attention/balanced_tile.cuh"
#include "cuda/attention/balanced_work.cuh"

namespace photon::cuda {

// What a CTA does one after the other: the partial tiles of its range, or the items of an exact
// step that it takes. The producer finds these out, and tells the consumers; a range is known to
// both. All threads of the producer must call all of it.
template <typename Plan>
class WorkQueue {
 public:
  __device__ WorkQueue(const PagedAttentionParams& p, const CtaWork<Plan>& work,
                       BalancedShared<Plan>& shared)
      : work_(work),
        shared_(shared),
        counter_(reinterpret_cast<unsigned*>(p.workspace) + kConsumers) {}

  // Tells the consumers what the queries to come are of. The caller has waited until these are
  // read, and has a barrier of the producer behind it.
  __device__ void tell(int number, const PartialTile& partial) {
    if constexpr (Plan::kIsExact) {
      if (is_first()) shared_.partials[number % 2] = partial;
    }
  }

  // Takes the next item. Its number comes from L2; nobody waits for that before next().
  __device__ void claim() {
    if constexpr (Plan::kIsExact) {
      if (is_first()) claimed_ = count_round(counter_, work_.count() - 1) + gridDim.x;
    }
  }

  // Moves to what has been taken, or to the range's next partial tile.
  __device__ void next(PartialTile& partial) {
    if constexpr (Plan::kIsExact) {
      if (is_first()) shared_.claimed = claimed_;
      sync_threads(kProducerBarrier, kWarpgroupThreads);
      partial = work_.of(shared_.claimed);
    } else {
      work_.next(partial);
    }
  }

  // Tells the consumers that there is no other.
  __device__ void end(int number) {
    if constexpr (Plan::kIsExact) {
      if (number == 0) return;
      wait_barrier(&shared_.queries_read[number % 2], parity_of(number) ^ 1);
      tell(number, {});
      sync_threads(kProducerBarrier, kWarpgroupThreads);
      arrive(&shared_.has_queries[number % 2]);
    }
  }

 private:
  __device__ static bool is_first() { return threadIdx.x % kWarpgroupThreads == 0; }

  CtaWork<Plan> work_;
  BalancedShared<Plan>& shared_;
  unsigned* counter_;
  int claimed_ = 0;
};

// The producer: one warpgroup, which copies what the partial tiles need, `next` and those behind
// it. What it has to know of a partial tile it finds out while it copies the one before; of the
// first, while the kernels before still run.
template <typename Plan>
__device__ void produce(const PagedAttentionParams& p, const TileTensors& tensors, PartialTile next,
                        const CtaWork<Plan>& work, int sharers, BalancedShared<Plan>& shared) {
  KeyRuns runs = look_up(p.cache, next.lengths, next.begin * kTileKeys);
  WorkQueue<Plan> queue(p, work, shared);
  wait_for_earlier();
  fence_async_global();
  int number = 0;
  for (int index = 0, looked_into = 0; next.is_there(); ++number) {
    const PartialTile partial = next;
    const Lengths lengths = partial.lengths;
    int32_t* const poisoned = shared.poisoned[number % 2];
    wait_barrier(&shared.queries_read[number % 2], parity_of(number) ^ 1);
    for (int d = threadIdx.x % kWarpgroupThreads; d <= Plan::kHeadDim; d += kWarpgroupThreads)
      poisoned[d] = INT_MAX;
    queue.tell(number, partial);
    sync_threads(kProducerBarrier, kWarpgroupThreads);
    copy_queries<Plan>(p, partial, sharers, shared.queries[number % 2]);
    arrive_when_copied(&shared.has_queries[number % 2]);
    for (int kv_tile = partial.begin; kv_tile < partial.end; ++kv_tile, ++index) {
      const int stage = stage_of(index);
      const int32_t first_position = kv_tile * kTileKeys;
      const KeyRuns own = runs;
      wait_barrier(&shared.keys_read[stage], parity_of(index) ^ 1);
      copy_tile<Plan>(tensors.k_map, tensors.k, partial.kv_head, own, shared.keys[stage],
                      &shared.has_keys[stage]);
      if (kv_tile == max(partial.end - 2, partial.begin)) queue.claim();
      if (kv_tile + 1 < partial.end) {
        runs = look_up(p.cache, lengths, first_position + kTileKeys);
      } else {
        queue.next(next);
        runs = look_up(p.cache, next.lengths, next.begin * kTileKeys);
      }
      wait_barrier(&shared.values_read[stage], parity_of(index) ^ 1);
      const bool ends = first_position + kTileKeys > lengths.least;
      copy_tile<Plan>(tensors.v_map, tensors.v, partial.kv_head, own, shared.values[stage],
                      ends ? &shared.has_raw_values : &shared.has_values[stage]);
      if (!ends) continue;
      wait_barrier(&shared.has_raw_values, looked_into++ % 2);
      hide_values<Plan>(shared.values[stage], first_position, lengths, poisoned);
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) arrive(&shared.has_values[stage]);
    }
  }
  queue.end(number);
}

}  // namespace photon::cuda
