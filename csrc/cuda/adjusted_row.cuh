// A row of logits that are not what is sampled: some ids have a bias or penalties.
//
// The adjusted ids of a CTA's part of the row are found once, before all passes over it, and listed
// with their scores. A pass then takes the vectors as they are, in which listed ids are hidden, and
// the list. Where the list is too short, or the row too long, each pass asks for every id.
#pragma once
#include "common/penalties.h"
#include "cuda/logits_row.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// What a CTA has room for: words of 32 ids of its part of the row, and ids on its list. A cluster
// takes 262,144 ids, of which 8,192 are adjusted.
template <int kBlocks>
constexpr int kHidingWords = 8192 / (kBlocks > 1 ? kBlocks : 8);

// In the shared memory of each CTA.
template <int kBlocks>
struct HiddenIds {
  static constexpr int kMost = kHidingWords<kBlocks>;

  uint32_t biased, others;  // that belong on the list, perhaps more than fit; first the biased
  uint32_t words[kMost];    // the ids of the CTA's part, a bit each
  int32_t ids[kMost];
  float scores[kMost];

  __device__ uint32_t count() const { return biased + others; }

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
__device__ __noinline__ float adjusted_score(const Adjustment& adjustment, float logit,
                                             int32_t id) {
  return adjustment.adjusted(logit, id);
}

// A row that is asked for every id.
template <typename T>
struct AdjustedRow : Row<T> {
  using Whole = AdjustedRow;
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

// A row whose adjusted ids are hidden.
template <typename T, int kBlocks>
struct HidingRow : Row<T> {
  using Whole = AdjustedRow<T>;
  using Places = HidingPlaces<T, kBlocks>;

  const HiddenIds<kBlocks>& hidden;

  template <typename Shared>
  __device__ static HidingRow of(const Shared& shared) {
    return {shared.plan.row(), shared.hidden};
  }

  // The hidden ids of a vector of this thread, a bit each.
  __device__ uint32_t hidden_ids(int vector) const {
    constexpr int kIds = Places::kIds;
    const int thread = threadIdx.x;
    const uint32_t word =
        hidden.words[vector / Places::kStep * Places::kTurnWords + thread / Places::kWordVectors];
    return word >> (thread % Places::kWordVectors * kIds) & Vector<T>::kAll;
  }

  // Calls body(id, score) for the thread's part of those that are hidden.
  template <typename Body>
  __device__ void for_hidden(const Body& body) const {
    for (uint32_t i = threadIdx.x; i < hidden.count(); i += kSampleThreads)
      body(hidden.ids[i], hidden.scores[i]);
  }
};

// Finds the adjusted ids of the CTA's part of the row.
template <typename T, int kBlocks>
struct Hiding {
  using Places = HidingPlaces<T, kBlocks>;

  const Row<T>& row;
  const Adjustment& adjustment;
  const int part;  // which CTA of the row's
  HiddenIds<kBlocks>& found;

  // All threads of the CTA call it; false: they are too many, or the row is too long, or there are
  // ids whose bits are not kept. A thread has left the scores that it passes in for_hidden().
  __device__ bool all() const {
    const int64_t counted = min(adjustment.counted_ids, static_cast<int64_t>(row.vocab));
    if (Places::num_words(row.vocab) > found.kMost || counted > adjustment.seen_ids) return false;
    if (threadIdx.x == 0) found.biased = found.others = 0;
    put_biased();
    __syncthreads();
    put_penalized();
    __syncthreads();
    if (found.count() > found.kMost) return false;
    const bool has_counts = adjustment.counts != nullptr;
    for (uint32_t i = threadIdx.x; i < found.count(); i += kSampleThreads) {
      const int32_t id = found.ids[i], count = has_counts ? adjustment.count_of(id) : 0;
      const bool is_biased = i < found.biased;
      float score = to_float(row.logits[id]);
      if (is_biased) score = adjustment.biased(score, id);
      if (has_counts)
        score = adjustment.penalized(score, count, !is_biased || adjustment.is_seen(id));
      found.scores[i] = score;
    }
    return true;
  }

 private:
  // The bits of those ids of a word that have penalties.
  __device__ uint32_t penalized_ids(int32_t first) const {
    const int32_t left = row.vocab - first;
    if (left <= 0 || first >= adjustment.seen_ids) return 0;
    const uint32_t bits = adjustment.seen_word(first);
    return left < 32 ? bits & ((1u << left) - 1) : bits;
  }

  __device__ void put_penalized() const {
    constexpr int kOwn = HiddenIds<kBlocks>::kMost / kSampleThreads;
    uint32_t bits[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      bits[i] = penalized_ids(Places::first_id(i * kSampleThreads + threadIdx.x, part));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int word = i * kSampleThreads + threadIdx.x;
      const uint32_t more = adjustment.num_biases > 0 ? bits[i] & ~found.words[word] : bits[i];
      found.words[word] = adjustment.num_biases > 0 ? bits[i] | found.words[word] : bits[i];
      put_bits(more, Places::first_id(word, part));
    }
  }

  // Lists the ids from `first` on whose bits are set. All lanes of a warp call it.
  __device__ void put_bits(uint32_t bits, int32_t first) const {
    if (__any_sync(kFullWarp, bits != 0) == 0) return;
    const int lane = threadIdx.x % kWarpSize, own = __popc(bits);
    int sum = own;  // of the lanes up to this one
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int below = __shfl_up_sync(kFullWarp, sum, offset);
      if (lane >= offset) sum += below;
    }
    uint32_t at = 0;
    if (lane == kWarpSize - 1)
      at = found.biased + atomicAdd(&found.others, static_cast<uint32_t>(sum));
    at = __shfl_sync(kFullWarp, at, kWarpSize - 1) + sum - own;
    for (; bits != 0; bits &= bits - 1) found.put(at++, first + __ffs(static_cast<int>(bits)) - 1);
    __syncwarp();  // who had nothing to put has waited for the others
  }

  // A bias's id may be any number.
  __device__ void put_biased() const {
    if (adjustment.num_biases == 0) return;
    for (int word = threadIdx.x; word < found.kMost; word += kSampleThreads) found.words[word] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < adjustment.num_biases; i += kSampleThreads) {
      const int32_t id = adjustment.biases[2 * i];
      if (id < 0 || id >= row.vocab || Places::part_of(id) != part) continue;
      const uint32_t bit = 1u << id % 32;
      if ((atomicOr(&found.words[Places::word_of(id)], bit) & bit) == 0)
        found.put(atomicAdd(&found.biased, 1u), id);
    }
  }
};

// Not inlined, so that it has all registers.
template <typename T, int kBlocks, typename Shared>
__device__ __noinline__ bool hide_adjusted() {
  Shared& shared = shared_as<Shared>();
  const Row<T> row = shared.plan.row();
  const int part = part_of_row<kBlocks>();
  prefetch_row(row, own_vectors<kBlocks>(part));
  return Hiding<T, kBlocks>{row, shared.plan.adjustment, part, shared.hidden}.all();
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
  for_shown<kScoreLoads>(
      row, share,
      [&](const V& v, int vector) {  // for now by the vector's first id
        if (const float score = largest(v); score > best.score) {
          best = {score, vector * V::kIds};
          vector_of_best = vector;
        }
        return 0u;
      },
      take);
  if (vector_of_best >= 0) best.id = shown_with(row, best.score, vector_of_best);
  row.for_hidden(take);
  return best;
}

}  // namespace photon::cuda
