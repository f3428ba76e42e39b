// A row of logits that are not what is sampled: some ids have a bias or penalties.
//
// The adjusted ids of a CTA's part of the row are found once, before all passes over it, and listed
// with their scores. A pass then takes the vectors as they are, in which listed ids are hidden, and
// the list. Where the list is too short, or the row too long, each pass asks for every id.
#pragma once
#include "common/penalties.h"
#include "cuda/logits_row.cuh"

namespace photon::cuda {

constexpr int kHidingVectors = 8;  // that a thread can have: 262,144 ids of 16 bits in a cluster
constexpr int kHiddenIds = 1024;   // of a CTA

// In the shared memory of each CTA.
struct HiddenIds {
  uint32_t count;  // that belong on the list, perhaps more than fit
  alignas(4) uint8_t of_vector[kHidingVectors][kSampleThreads];  // a bit each id of a vector
  int32_t ids[kHiddenIds];
  float scores[kHiddenIds];

  __device__ void put(int32_t id) {
    const uint32_t at = atomicAdd(&count, 1u);
    if (at < kHiddenIds) ids[at] = id;
  }
};

// Not inlined, because it stands in many places, few of which are passed often.
__device__ __noinline__ float adjusted_score(const Adjustment& adjustment, float logit,
                                             int32_t id) {
  return adjustment.adjusted(logit, id);
}

template <typename T>
struct AdjustedRow : Row<T> {
  static constexpr int kIds = Vector<T>::kIds;

  Adjustment adjustment;
  const HiddenIds* hidden = nullptr;  // null: none are hidden
  int step_bits = 0;                  // log2 of ThreadVectors::step, where some are

  __device__ float score(float logit, int32_t id) const {
    return adjusted_score(adjustment, logit, id);
  }

  // Of an id that is not hidden.
  __device__ float shown_score(float logit, int32_t id) const {
    return hidden != nullptr ? logit : score(logit, id);
  }

  // Whether a vector's logits, but for those that are hidden, are not what is sampled.
  __device__ bool adjusts(int vector) const {
    return hidden == nullptr && adjusted_ids(vector * kIds) != 0;
  }

  // Makes the ids of a vector of this thread -inf that are hidden.
  __device__ void hide(Vector<T>& v, int vector) const {
    const uint32_t bits = hidden_of(vector);
    if (bits == 0) return;
#pragma unroll
    for (int i = 0; i < kIds; ++i)
      if ((bits >> i & 1u) != 0) v.of_id[i] = from_float<T>(-INFINITY);
  }

  // Calls body(id, score) for the thread's part of those that are hidden.
  template <typename Body>
  __device__ void for_hidden(const Body& body) const {
    if (hidden == nullptr) return;
    for (uint32_t i = threadIdx.x; i < hidden->count; i += kSampleThreads)
      body(hidden->ids[i], hidden->scores[i]);
  }

  // The lowest id of a vector of this thread whose score is this one and that is not hidden.
  __device__ int32_t shown_with(float wanted, int vector) const {
    const uint32_t bits = hidden_of(vector);
    const int32_t first = vector * kIds;
    for (int i = 0; i < min(kIds, this->vocab - first); ++i) {
      if ((bits >> i & 1u) == 0 &&
          shown_score(to_float(this->logits[first + i]), first + i) == wanted)
        return first + i;
    }
    return first;
  }

  // Which of the ids from `first` on, a vector's, have a count, are in the prompt or have a bias: a
  // bit each.
  __device__ __noinline__ uint32_t adjusted_ids(int32_t first) const {
    uint32_t bits = penalized_ids(first);
    for (int32_t place = adjustment.bias_place(first);
         place < adjustment.num_biases && adjustment.biases[2 * place] - first < kIds; ++place)
      bits |= 1u << (adjustment.biases[2 * place] - first);
    return bits;
  }

  __device__ uint32_t penalized_ids(int32_t first) const {
    static_assert(32 % kIds == 0, "a vector's bits are in one word");
    uint32_t bits = adjustment.counts != nullptr ? counted_ids(first) : 0;
    if (first < adjustment.prompt_ids)
      bits |= static_cast<uint32_t>(adjustment.prompt_bits[first >> 5]) >> (first & 31) &
              ((1u << kIds) - 1);
    return bits;
  }

 private:
  __device__ uint32_t hidden_of(int vector) const {
    return hidden == nullptr ? 0 : hidden->of_vector[vector >> step_bits][threadIdx.x];
  }

  __device__ uint32_t counted_ids(int32_t first) const {
    const int32_t* counts = adjustment.counts + first;
    uint32_t bits = 0;
    if (first + kIds <= adjustment.counted_ids && is_vector_aligned(counts)) {
#pragma unroll
      for (int i = 0; i < kIds; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(counts + i);
        bits |= ((four.x != 0 ? 1u : 0u) | (four.y != 0 ? 2u : 0u) | (four.z != 0 ? 4u : 0u) |
                 (four.w != 0 ? 8u : 0u))
                << i;
      }
    } else {
      for (int i = 0; i < kIds && first + i < adjustment.counted_ids; ++i)
        bits |= (counts[i] != 0 ? 1u : 0u) << i;
    }
    return bits;
  }
};

// Finds the adjusted ids of the CTA's part of the row, of which `row` knows none yet.
template <typename T, int kBlocks>
struct Hiding {
  static constexpr int kIds = Vector<T>::kIds, kStep = kBlocks * kSampleThreads;
  static constexpr int kAtOnce = 2;  // vectors whose loads are under way together

  const AdjustedRow<T>& row;
  const int part;  // which CTA of the row's
  HiddenIds& found;

  // All threads of the CTA call it; false: they are too many.
  __device__ bool all() const {
    if (ceil_div(row.vocab, kIds) > kHidingVectors * kStep) return false;
    if (threadIdx.x == 0) found.count = 0;
    __syncthreads();
    put_penalized();
    __syncthreads();
    put_biased();
    __syncthreads();
    if (found.count > kHiddenIds) return false;
    for (uint32_t i = threadIdx.x; i < found.count; i += kSampleThreads)
      found.scores[i] = row.score(to_float(row.logits[found.ids[i]]), found.ids[i]);
    __syncthreads();
    return true;
  }

 private:
  __device__ int vector_of(int k) const {
    return k * kStep + part * kSampleThreads + static_cast<int>(threadIdx.x);
  }

  __device__ void put_penalized() const {
    const int vectors = static_cast<int>(ceil_div(row.vocab, kIds));
#pragma unroll 1
    for (int from = 0; vector_of(from) < vectors; from += kAtOnce) {
      uint32_t bits[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        bits[k] = vector_of(from + k) < vectors ? row.penalized_ids(vector_of(from + k) * kIds) : 0;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int32_t first = vector_of(from + k) * kIds, left = row.vocab - first;
        if (left <= 0) break;
        if (left < kIds) bits[k] &= (1u << left) - 1;
        found.of_vector[from + k][threadIdx.x] = static_cast<uint8_t>(bits[k]);
        for (; bits[k] != 0; bits[k] &= bits[k] - 1)
          found.put(first + __ffs(static_cast<int>(bits[k])) - 1);
      }
    }
  }

  // A bias's id may be any number.
  __device__ void put_biased() const {
    for (int i = threadIdx.x; i < row.adjustment.num_biases; i += kSampleThreads) {
      const int32_t id = row.adjustment.biases[2 * i];
      if (id < 0 || id >= row.vocab) continue;
      const int vector = id / kIds, place = vector % kStep - part * kSampleThreads;
      if (place < 0 || place >= kSampleThreads) continue;  // another CTA's
      uint8_t* bytes = found.of_vector[vector / kStep] + place / 4 * 4;
      const uint32_t bit = 1u << (place % 4 * 8 + id % kIds);
      if ((atomicOr(reinterpret_cast<uint32_t*>(bytes), bit) & bit) == 0) found.put(id);
    }
  }
};

// Hides the adjusted ids, unless they are too many. Not inlined, so that it has all registers.
template <typename T, int kBlocks>
__device__ __noinline__ void hide_adjusted(AdjustedRow<T>& row, int part, HiddenIds& found) {
  if (!Hiding<T, kBlocks>{row, part, found}.all()) return;
  row.hidden = &found;
  row.step_bits = __ffs(Hiding<T, kBlocks>::kStep) - 1;
}

// The thread's largest score and its id.
template <typename T>
__device__ Candidate greedy_best(const AdjustedRow<T>& row, ThreadVectors share) {
  constexpr int kIds = Vector<T>::kIds;
  Candidate best;
  int vector_of_best = -1;  // the best is one of its ids
  const auto take = [&](int32_t id, float score) {
    if (!(score > -INFINITY) || !is_better({score, id}, best)) return;
    best = {score, id};
    vector_of_best = -1;
  };
  for_shown(
      row, share,
      [&](const Vector<T>& v, int vector) {  // for now by the vector's first id
        if (const float score = largest(v); score > best.score) {
          best = {score, vector * kIds};
          vector_of_best = vector;
        }
        return true;
      },
      take);
  if (vector_of_best >= 0) best.id = row.shown_with(best.score, vector_of_best);
  row.for_hidden(take);
  return best;
}

}  // namespace photon::cuda
