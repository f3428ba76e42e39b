// A row's automaton (common/automaton.h) in the sampler and in publish.
#pragma once
#include "common/automaton.h"
#include "common/out_record.h"
#include "cuda/sampling/logits_row.cuh"
#include "cuda/sampling/row_reduce.cuh"

namespace photon::cuda {

// Makes -inf what a mask does not allow. The threads of all CTAs of the row call it.
template <typename T, int kBlocks>
__device__ void forbid_by_mask(const SampleParams& p, int64_t r, const int32_t* mask, int part) {
  constexpr int kIds = Vector<T>::kIds;
  constexpr uint32_t kAll = (1u << kIds) - 1;
  T* logits = static_cast<T*>(p.logits) + r * p.logits_stride;
  const Row<T> row = row_of<T>(p, r);
  const ThreadVectors share = own_vectors<kBlocks>(part);
  const int whole = is_vector_aligned(logits) ? row.vocab / kIds : 0;
  const int end = static_cast<int>(ceil_div(row.vocab, kIds));
  for (int vector = share.first; vector < end; vector += share.step) {
    const int first = vector * kIds;
    const uint32_t allowed = static_cast<uint32_t>(mask[first / 32]) >> (first % 32) & kAll;
    if (allowed == kAll) continue;
    Vector<T> v = vector < whole ? load_vector<true>(row, vector) : load_vector<false>(row, vector);
#pragma unroll
    for (int i = 0; i < kIds; ++i)
      if ((allowed >> i & 1u) == 0) v.of_id[i] = from_float<T>(-INFINITY);
    if (vector < whole) {
      *reinterpret_cast<uint4*>(logits + first) = *reinterpret_cast<const uint4*>(&v);
    } else {
      for (int i = 0; i < kIds && i < row.vocab - first; ++i) logits[first + i] = v.of_id[i];
    }
  }
  sync_row<kBlocks>();
}

// The row has an automaton.
__device__ inline bool has_automaton(const SampleParams& p, int32_t row) {
  return row_words(p.row_state, row)[kRowAutomaton] != 0;
}

// Forbids what the row's automaton does not allow. False: the row names one that is none, and is
// not sampled. The threads of all CTAs of the row call it, and get the same. Not inlined, so that
// other rows have all registers.
template <typename T, int kBlocks>
__device__ __noinline__ bool apply_automaton(const SampleParams& p, int64_t r, int part) {
  const int32_t row = load_segment(p.segments, r).row;
  const Automaton automaton =
      load_automaton(p.automata, p.row_state, row, ceil_div(p.vocab, int64_t{32}));
  if (automaton.is_error) return false;
  forbid_by_mask<T, kBlocks>(p, r, automaton.mask(), part);
  return true;
}

// The state behind a token's bytes; kNoState: it is not allowed. All lanes of a warp call it, and
// get the same; each looks up the class of one byte.
__device__ inline int32_t state_behind(const Automaton& automaton, const TokenText& text,
                                       int lane) {
  int32_t state = text.length > 0 ? automaton.state : kNoState;
  for (int32_t begin = 0; begin < text.length && state != kNoState; begin += kWarpSize) {
    const int32_t count = text.length - begin < kWarpSize ? text.length - begin : kWarpSize;
    const int32_t own = lane < count ? automaton.class_of(text.bytes[begin + lane]) : 0;
    for (int32_t i = 0; i < count && state != kNoState; ++i)
      state = automaton.after(state, __shfl_sync(kFullWarp, own, i));
  }
  return state;
}

// Where a row's automaton goes with a token.
struct AutomatonStep {
  int32_t flags;  // RecordFlag: 0, kRecordComplete or kRecordAutomatonError
  int32_t state;  // what becomes the row's; kNoState: it stays
};

// All lanes of a warp call it, and get the same.
__device__ inline AutomatonStep step_automaton(const AutomataWords& all, const Automaton& automaton,
                                               int32_t token, int lane) {
  if (automaton.is_error) return {kRecordAutomatonError, kNoState};
  if (automaton.words == nullptr) return {0, kNoState};
  const TokenText text = token_text(all, token);
  if (text.ends) {
    const bool accepts = (automaton.state_word(automaton.state) & kStateAccepting) != 0;
    return {accepts ? kRecordComplete : kRecordAutomatonError, kNoState};
  }
  const int32_t state = state_behind(automaton, text, lane);
  if (state == kNoState) return {kRecordAutomatonError, kNoState};
  return {(automaton.state_word(state) & kStateComplete) != 0 ? kRecordComplete : 0, state};
}

}  // namespace photon::cuda
