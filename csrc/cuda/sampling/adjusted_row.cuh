// A row of logits that are not what is sampled: some ids have a bias or penalties.
//
// The adjusted ids of a CTA's part of the row are found and listed once, before all passes over it.
// A pass then takes the vectors as they are, in which listed ids are hidden, and the list with its
// scores. What a score is made of is asked for when an id is listed and comes from DRAM during the
// first pass. Where the list is too short, or the row too long, each pass asks for every id.
#pragma once
#include "common/penalties.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sampling/logits_row.cuh"

namespace photon::cuda {

// What a CTA has room for: words of 32 ids of its part of the row, and ids on its list. A cluster
// takes 262,144 ids, of which 8,192 are adjusted.
template <int kBlocks>
constexpr int kHidingWords = 8192 / (kBlocks > 1 ? kBlocks : 8);

// In the shared memory of each CTA.
template <int kBlocks>
struct HiddenIds {
  static constexpr int kMost = kHidingWords<kBlocks>;

  uint32_t listed;        // that belong on the list, perhaps more than fit
  uint32_t words[kMost];  // the ids of the CTA's part, a bit each
  int32_t ids[kMost];
  float scores[kMost];

  __device__ void put(uint32_t at, int32_t id) {
    if (at < kMost) ids[at] = id;
  }
};

// Where the ids of a CTA's part of a row have their bits. A turn of a thread is one vector.
template <typename T, int kBlocks>
struct HidingPlaces {
  static constexpr int kIds = Vector<T>::kIds, kStep = kBlocks * kSampleThreads;
  static constexpr int kWordVectors = 32 / kIds, kTurnWords = kSampleThreads / kWordVectors;

  __device__ static int num_words(int32_t vocab) {
    return static_cast<int>(ceil_div(vocab, kStep * kIds)) * kTurnWords;
  }
  // The first id of a word.
  __device__ static int32_t first_id(int word, int part) {
    return ((word / kTurnWords * kBlocks + part) * kTurnWords + word % kTurnWords) * 32;
  }
  // The CTA that has an id, and the id's word there.
  __device__ static int part_of(int32_t id) { return id / 32 / kTurnWords % kBlocks; }
  __device__ static int word_of(int32_t id) {
    return id / 32 / (kTurnWords * kBlocks) * kTurnWords + id / 32 % kTurnWords;
  }
};

// Not inlined, because it stands in many places, few of which are passed often.
__device__ __noinline__ inline float adjusted_score(const Adjustment& adjustment, float logit,
                                                    int32_t id) {
  return adjustment.adjusted(logit, id);
}

// A row that is asked for every id.
template <typename T>
struct AdjustedRow : Row<T> {
  static constexpr int kIds = Vector<T>::kIds;

  const Adjustment& adjustment;

  template <typename Shared>
  __device__ static AdjustedRow of(const Shared& shared) {
    return {shared.plan.row(), shared.plan.adjustment};
  }

  __device__ float score(float logit, int32_t id) const {
    return adjusted_score(adjustment, logit, id);
  }

  // Whether a vector's logits are not what is sampled.
  __device__ __noinline__ bool adjusts(int vector) const {
    const int32_t first = vector * kIds, place = adjustment.bias_place(first);
    return is_penalized(first) ||
           (place < adjustment.num_biases && adjustment.biases[2 * place] - first < kIds);
  }

 private:
  // Whether one of a vector's ids, from `first` on, has penalties.
  __device__ bool is_penalized(int32_t first) const {
    static_assert(32 % kIds == 0, "a vector's bits are in one word");
    if (first < adjustment.seen_ids)
      return (adjustment.seen_word(first) >> (first & 31) & Vector<T>::kAll) != 0;
    for (int64_t id = first; id < first + kIds && id < adjustment.counted_ids; ++id)
      if (adjustment.counts[id] > 0) return true;
    return false;
  }
};

// A row whose adjusted ids, if it has any, are hidden.
template <typename T, int kBlocks>
struct HidingRow : Row<T> {
  using Places = HidingPlaces<T, kBlocks>;

  HiddenIds<kBlocks>& hidden;
  const Adjustment& adjustment;
  const bool hides;

  template <typename Shared>
  __device__ static HidingRow of(Shared& shared) {
    return {shared.plan.row(), shared.hidden, shared.plan.adjustment, shared.hidden.listed > 0};
  }

  // The hidden ids of a vector of this thread, a bit each.
  __device__ uint32_t hidden_ids(int vector) const {
    if (!hides) return 0;
    constexpr int kIds = Places::kIds;
    const int thread = threadIdx.x;
    const uint32_t word =
        hidden.words[vector / Places::kStep * Places::kTurnWords + thread / Places::kWordVectors];
    return word >> (thread % Places::kWordVectors * kIds) & Vector<T>::kAll;
  }

  // Makes the scores that the thread passes in for_hidden(), once before it is called.
  __device__ void score_hidden() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < hidden.listed; i += kSampleThreads)
      hidden.scores[i] = adjustment.adjusted(to_float(this->logits[hidden.ids[i]]), hidden.ids[i]);
  }

  // Calls body(id, score) for the thread's part of those that are hidden.
  template <typename Body>
  __device__ void for_hidden(const Body& body) const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < hidden.listed; i += kSampleThreads)
      body(hidden.ids[i], hidden.scores[i]);
  }
};

// Finds the adjusted ids of the CTA's part of the row.
template <typename T, int kBlocks>
struct Hiding {
  using Places = HidingPlaces<T, kBlocks>;

  const Row<T> row;
  const Adjustment& adjustment;
  const int part;  // which CTA of the row's
  HiddenIds<kBlocks>& found;

  // All threads of the CTA call it, after plan_row(); false: they are too many, or the row is too
  // long, or there are ids whose bits are not kept.
  __device__ bool all() const {
    const int64_t counted = min(adjustment.counted_ids, static_cast<int64_t>(row.vocab));
    if (Places::num_words(row.vocab) > found.kMost || counted > adjustment.seen_ids) return false;
    put_penalized();
    if (adjustment.num_biases > 0) put_biased();
    list();
    __syncthreads();
    return found.listed <= found.kMost;
  }

 private:
  static constexpr int kOwn = HiddenIds<kBlocks>::kMost / kSampleThreads;  // words of a thread

  __device__ static int word(int i) { return i * kSampleThreads + threadIdx.x; }

  // The bits of those ids of a word that have penalties.
  __device__ uint32_t penalized_ids(int32_t first) const {
    const int32_t left = row.vocab - first;
    if (left <= 0 || first >= adjustment.seen_ids) return 0;
    const uint32_t bits = adjustment.seen_word(first);
    return left < 32 ? bits & ((1u << left) - 1) : bits;
  }

  __device__ void put_penalized() const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      found.words[word(i)] = penalized_ids(Places::first_id(word(i), part));
  }

  // A bias's id may be any number.
  __device__ void put_biased() const {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < adjustment.num_biases; i += kSampleThreads) {
      const int32_t id = adjustment.biases[2 * i];
      if (id >= 0 && id < row.vocab && Places::part_of(id) == part)
        atomicOr(&found.words[Places::word_of(id)], 1u << id % 32);
    }
    __syncthreads();
  }

  // Lists the ids whose bits are set.
  __device__ void list() const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += __popc(found.words[word(i)]);
    uint32_t at = place_of(own);
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      const int32_t first = Places::first_id(word(i), part);
#pragma unroll 1
      for (uint32_t bits = found.words[word(i)]; bits != 0; bits &= bits - 1) {
        const int32_t id = first + __ffs(static_cast<int>(bits)) - 1;
        if (id < adjustment.counted_ids) prefetch_l2(adjustment.counts + id);  // to be scored soon
        found.put(at++, id);
      }
    }
  }

  // Where the thread lists as many ids. All lanes of a warp call it.
  __device__ uint32_t place_of(int own) const {
    if (__any_sync(kFullWarp, own != 0) == 0) return 0;
    const int lane = threadIdx.x % kWarpSize;
    const int sum = warp_sum_upto(own);
    uint32_t at = 0;
    if (lane == kWarpSize - 1) at = atomicAdd(&found.listed, static_cast<uint32_t>(sum));
    return __shfl_sync(kFullWarp, at, kWarpSize - 1) + sum - own;
  }
};

// Has what tells the adjusted ids of the CTA's part of the row brought into L2.
template <typename T, int kBlocks>
__device__ void prefetch_adjustment(const Adjustment& adjustment, int part) {
  constexpr int kSectorWords = 8;  // that are loaded from DRAM together
#pragma unroll 1
  for (int i = threadIdx.x; i < adjustment.num_biases; i += kSampleThreads)
    prefetch_l2(adjustment.biases + 2 * i);
  if (threadIdx.x % kSectorWords != 0) return;
#pragma unroll 1
  for (int word = threadIdx.x; word < HiddenIds<kBlocks>::kMost; word += kSampleThreads) {
    const int32_t first = HidingPlaces<T, kBlocks>::first_id(word, part);
    if (first < adjustment.seen_ids) prefetch_l2(adjustment.seen_bits + first / 32);
  }
}

// Not inlined, so that it has all registers.
template <typename T, int kBlocks, typename Shared>
__device__ __noinline__ bool hide_adjusted() {
  Shared& shared = shared_as<Shared>();
  return Hiding<T, kBlocks>{shared.plan.row(), shared.plan.adjustment, part_of_row<kBlocks>(),
                            shared.hidden}
      .all();
}

// The lowest id of a vector whose logit is this one and that is not hidden.
template <typename AnyRow>
__device__ int32_t shown_with(const AnyRow& row, float logit, int vector) {
  using V = Vector<typename AnyRow::Element>;
  V v = load_vector<false>(row, vector);
  v.hide(row.hidden_ids(vector));
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
  row.score_hidden();
  row.for_hidden(take);
  return best;
}

}  // namespace photon::cuda
