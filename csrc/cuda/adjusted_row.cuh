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

// A row that is asked for every id.
template <typename T>
struct AdjustedRow : Row<T> {
  static constexpr int kIds = Vector<T>::kIds;

  Adjustment adjustment;

  __device__ float score(float logit, int32_t id) const {
    return adjusted_score(adjustment, logit, id);
  }

  // Whether a vector's logits are not what is sampled.
  __device__ __noinline__ bool adjusts(int vector) const {
    const int32_t first = vector * kIds, place = adjustment.bias_place(first);
    return penalized_ids(first) != 0 ||
           (place < adjustment.num_biases && adjustment.biases[2 * place] - first < kIds);
  }

  // Which of the ids from `first` on, a vector's, have a count or are in the prompt: a bit each.
  __device__ uint32_t penalized_ids(int32_t first) const {
    static_assert(32 % kIds == 0, "a vector's bits are in one word");
    uint32_t bits = adjustment.counts != nullptr ? counted_ids(first) : 0;
    if (first < adjustment.prompt_ids)
      bits |= static_cast<uint32_t>(adjustment.prompt_bits[first >> 5]) >> (first & 31) &
              ((1u << kIds) - 1);
    return bits;
  }

 private:
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

// A row whose adjusted ids are hidden.
template <typename T, int kBlocks>
struct HidingRow : Row<T> {
  static constexpr int kIds = Vector<T>::kIds, kStep = kBlocks * kSampleThreads;

  const HiddenIds& hidden;

  // Makes the hidden ids of a vector of this thread -inf.
  __device__ void hide(Vector<T>& v, int vector) const {
    const uint32_t bits = hidden.of_vector[vector / kStep][threadIdx.x];
#pragma unroll
    for (int i = 0; i < kIds; ++i)
      if ((bits >> i & 1u) != 0) v.of_id[i] = from_float<T>(-INFINITY);
  }

  // Calls body(id, score) for the thread's part of those that are hidden.
  template <typename Body>
  __device__ void for_hidden(const Body& body) const {
    for (uint32_t i = threadIdx.x; i < hidden.count; i += kSampleThreads)
      body(hidden.ids[i], hidden.scores[i]);
  }
};

// Finds the adjusted ids of the CTA's part of the row.
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
    for (int from = 0; from * kStep + part * kSampleThreads < vectors; from += kAtOnce) {
      uint32_t bits[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        bits[k] = vector_of(from + k) < vectors ? row.penalized_ids(vector_of(from + k) * kIds) : 0;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int32_t first = vector_of(from + k) * kIds, left = row.vocab - first;
        if (left > 0 && left < kIds) bits[k] &= (1u << left) - 1;
        if (left > 0) found.of_vector[from + k][threadIdx.x] = static_cast<uint8_t>(bits[k]);
        for (; bits[k] != 0; bits[k] &= bits[k] - 1)
          found.put(first + __ffs(static_cast<int>(bits[k])) - 1);
      }
      __syncwarp();  // who had nothing to put has waited for the others
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

// Not inlined, so that it has all registers.
template <typename T, int kBlocks>
__device__ __noinline__ bool hide_adjusted(const AdjustedRow<T>& row, int part, HiddenIds& found) {
  return Hiding<T, kBlocks>{row, part, found}.all();
}

// The lowest id of a vector whose logit is this one and that is not hidden.
template <typename AnyRow>
__device__ int32_t shown_with(const AnyRow& row, float logit, int vector) {
  using V = Vector<typename AnyRow::Element>;
  V v = load_vector<false>(row, vector);
  row.hide(v, vector);
  int32_t id = vector * V::kIds;
#pragma unroll
  for (int i = V::kIds - 1; i >= 0; --i)
    if (to_float(v.of_id[i]) == logit) id = vector * V::kIds + i;
  return id;
}

// The thread's largest score and its id.
template <typename AnyRow>
__device__ Candidate greedy_best(const AnyRow& row, ThreadVectors share) {
  using V = Vector<typename AnyRow::Element>;
  Candidate best;
  int vector_of_best = -1;  // the best is one of its ids
  const auto take = [&](int32_t id, float score) {
    if (!(score > -INFINITY) || !is_better({score, id}, best)) return;
    best = {score, id};
    vector_of_best = -1;
  };
  for_shown(
      row, share,
      [&](const V& v, int vector) {  // for now by the vector's first id
        if (const float score = largest(v); score > best.score) {
          best = {score, vector * V::kIds};
          vector_of_best = vector;
        }
        return true;
      },
      take);
  if (vector_of_best >= 0) best.id = shown_with(row, best.score, vector_of_best);
  row.for_hidden(take);
  return best;
}

}  // namespace photon::cuda
