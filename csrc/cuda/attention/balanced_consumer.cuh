// The consumers of a CTA of balanced_attention: two warpgroups, each with half of the rows of every
// partial tile.
#pragma once
#include "cuda/attention/balanced_reduction.cuh"
#include "cuda/attention/balanced_work.cuh"

namespace photon::cuda {

// Of an exact step: the parts of a partial tile, each of which is summed from zero, and which are
// added up one by one, in a slot. `first` is the place of its first KV tile in the rings.
template <typename Plan>
__device__ void attend_parts(const PagedAttentionParams& p, const PartialTile& partial,
                             const RowLengths& lengths, const Bf16* queries, int first,
                             BalancedShared<Plan>& shared, BalancedSoftmax<Plan>& state) {
  const Slot<Plan> sums = Workspace<Plan>(p).own();
  int begin = partial.begin;
#pragma unroll 1
  while (true) {
    const int end = min(part_begin(part_of(begin) + 1), partial.end);
    attend_tiles(p, begin, end, first + begin - partial.begin, lengths, queries, shared, state);
    if (begin > partial.begin) add_partial<true>(sums, p.scale * kLog2E, state);
    if (end == partial.end) return;
    __syncwarp();  // all lanes have read what is there
    leave_partial(sums, state);
    __syncwarp();
    state = {};
    begin = end;
  }
}

// Moves to what the producer tells, or to the range's next partial tile.
template <typename Plan>
__device__ void next_partial(PartialTile& partial, CtaWork<Plan>& work, int number,
                             BalancedShared<Plan>& shared) {
  if constexpr (Plan::kIsExact) {
    wait_barrier(&shared.has_queries[number % 2], parity_of(number));
    partial = shared.partials[number % 2];
  } else {
    work.next(partial);
  }
}

// Of `partial` and of those behind it.
template <typename Plan>
__device__ void consume(const PagedAttentionParams& p, const StepTokens& tokens,
                        PartialTile partial, CtaWork<Plan> work, BalancedShared<Plan>& shared) {
  wait_for_earlier();
  for (int number = 0, index = 0; partial.is_there();) {
    const RowLengths lengths(tokens, partial);
    Bf16* const queries = shared.queries[number % 2];
    BalancedSoftmax<Plan> state;
    // in an exact step next_partial() has waited already, but for the first
    wait_barrier(&shared.has_queries[number % 2], parity_of(number));
    fence_async_shared();  // threads have copied them
    if constexpr (Plan::kIsExact) {
      attend_parts(p, partial, lengths, queries, index, shared, state);
    } else {
      attend_tiles(p, partial.begin, partial.end, index, lengths, queries, shared, state);
    }
    index += partial.end - partial.begin;
    finish_partial(p, partial, lengths, tokens.sharers, number, shared, state);
    next_partial(partial, work, ++number, shared);
  }
}

}  // namespace photon::cuda
