// A row of logits as the threads of a CTA or of a cluster read it, and the largest of it.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/params.h"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sampling/row_reduce.cuh"

namespace photon::cuda {

constexpr int kSampleLoads =
    5;  // vectors that a thread has under way; all of a cluster are 163,840 ids of 16 bits

// The logits of kVectorBytes; -inf past the end of the row.
template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kIds = kVectorBytes / sizeof(T);
  static constexpr uint32_t kAll = (1u << kIds) - 1;

  T of_id[kIds];

  // Makes those whose bits are set -inf.
  __device__ void hide(uint32_t bits) {
    if (bits == 0) return;
#pragma unroll
    for (int i = 0; i < kIds; ++i)
      if ((bits >> i & 1u) != 0) of_id[i] = from_float<T>(-INFINITY);
  }

  // Drops the first, so that the next takes its place: registers have no index.
  __device__ void drop_first() {
    constexpr int kShift = 8 * sizeof(T);
    uint32_t words[4];
    memcpy(words, of_id, sizeof(words));
#pragma unroll
    for (int i = 0; i < 3; ++i)
      words[i] = kShift == 32 ? words[i + 1] : __funnelshift_r(words[i], words[i + 1], kShift);
    words[3] >>= kShift % 32;  // nothing looks at what a float leaves
    memcpy(of_id, words, sizeof(words));
  }
};

template <typename T>
struct Row {
  using Element = T;

  const T* logits;
  int32_t vocab;

  // The row of a CTA's shared memory (SampleShared).
  template <typename Shared>
  __device__ static Row of(const Shared& shared) {
    return shared.plan.row();
  }

  // What is sampled of a logit of an id that is not hidden.
  __device__ float score(float logit, int32_t) const { return logit; }

  // As those of AdjustedRow and HidingRow.
  __device__ bool adjusts(int) const { return false; }
  __device__ uint32_t hidden_ids(int) const { return 0; }
  __device__ void score_hidden() const {}
  template <typename Body>
  __device__ void for_hidden(const Body&) const {}
};

// kWhole: the vector is aligned and within the row.
template <bool kWhole, typename T>
__device__ Vector<T> load_vector(const Row<T>& row, int vector) {
  Vector<T> v;
  const int first = vector * Vector<T>::kIds;
  if constexpr (kWhole) {
    *reinterpret_cast<uint4*>(&v) = *reinterpret_cast<const uint4*>(row.logits + first);
  } else {
#pragma unroll
    for (int i = 0; i < Vector<T>::kIds; ++i)
      v.of_id[i] = i < row.vocab - first ? row.logits[first + i] : from_float<T>(-INFINITY);
  }
  return v;
}

// NaN only where all are.
__device__ inline float largest(const Vector<float>& v) {
  return fmaxf(fmaxf(v.of_id[0], v.of_id[1]), fmaxf(v.of_id[2], v.of_id[3]));
}

template <typename T>
__device__ float largest(const Vector<T>& v) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair* pairs = reinterpret_cast<const Pair*>(v.of_id);
  const Pair both = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(both), __high2float(both));
}

template <typename T>
__device__ Row<T> row_of(const SampleParams& p, int64_t r) {
  return {static_cast<const T*>(p.logits) + r * p.logits_stride, static_cast<int32_t>(p.vocab)};
}

// The vectors, or ids, that one thread reads: every `step`-th one from `first` on.
struct ThreadVectors {
  int first, step;
};

template <int kBlocks>
__device__ ThreadVectors own_vectors(int part) {
  return {part * kSampleThreads + static_cast<int>(threadIdx.x), kBlocks * kSampleThreads};
}

// Takes the largest logit of the vectors begin .. end - 1 (there may be none), if it is
// larger than `best`. The candidate's id is its vector's first id; the thread's earlier vectors had
// lower ids. Past the last vector it reads the last one again, which changes nothing.
template <bool kWhole, typename T>
__device__ void take_largest(Candidate& best, const Row<T>& row, int begin, int end,
                             ThreadVectors share) {
  for (int vector = begin + share.first; vector < end; vector += kSampleLoads * share.step) {
    Vector<T> v[kSampleLoads];
#pragma unroll
    for (int i = 0; i < kSampleLoads; ++i)
      v[i] = load_vector<kWhole>(row, min(vector + i * share.step, end - 1));
#pragma unroll
    for (int i = 0; i < kSampleLoads; ++i) {
      const float score = largest(v[i]);
      if (score > best.score)
        best = {score, min(vector + i * share.step, end - 1) * Vector<T>::kIds};
    }
  }
}

// The thread's largest logit, as the first id of its vector. NaN and -inf are not larger than the
// -inf of no candidate.
template <typename T>
__device__ Candidate greedy_best(const Row<T>& row, ThreadVectors share) {
  constexpr int kIds = Vector<T>::kIds;
  const int whole = is_vector_aligned(row.logits) ? row.vocab / kIds : 0;
  Candidate best;
  take_largest<true>(best, row, 0, whole, share);
  take_largest<false>(best, row, whole, static_cast<int>(ceil_div(row.vocab, kIds)), share);
  return best;
}

// Has the thread's vectors brought into L2, from where all loads of them are quick.
template <typename T>
__device__ void prefetch_row(const Row<T>& row, ThreadVectors share) {
  constexpr int kLineVectors = 128 / kVectorBytes;
  if (threadIdx.x % kLineVectors != 0) return;
  const int end = row.vocab / Vector<T>::kIds;
#pragma unroll 1
  for (int vector = share.first; vector < end; vector += share.step)
    prefetch_l2(row.logits + vector * Vector<T>::kIds);
}

// Calls body(id, logit) for each of the vector's ids that is a candidate. The code is there once:
// unrolled, it would take longer to fetch than to run.
template <typename T, typename Body>
__device__ void for_candidates(Vector<T> v, int32_t first, const Body& body) {
#pragma unroll 1
  for (int i = 0; i < Vector<T>::kIds; ++i) {
    const float logit = to_float(v.of_id[0]);
    v.drop_first();
    if (logit > -INFINITY) body(first + i, logit);
  }
}

// Looks at the thread's vectors, of which one is loaded ahead: from L2, see prefetch_row(). Where
// the logits of one are what is sampled, settle(v, vector) says whether it is done with; of others
// body(id, score) is called for each id whose logit is a candidate. Those that the row hides are
// -inf in v, and so is what lies past the end of the row.
template <typename AnyRow, typename Settle, typename Body>
__device__ void for_shown(const AnyRow& row, ThreadVectors share, const Settle& settle,
                          const Body& body) {
  using V = Vector<typename AnyRow::Element>;
  const Row<typename AnyRow::Element>& plain = row;
  const int whole = is_vector_aligned(row.logits) ? row.vocab / V::kIds : 0;
  const int end = static_cast<int>(ceil_div(row.vocab, V::kIds));
  V ahead = share.first < whole ? load_vector<true>(plain, share.first) : V{};
#pragma unroll 1
  for (int at = share.first; at < end; at += share.step) {
    V v = ahead;
    if (at + share.step < whole) ahead = load_vector<true>(plain, at + share.step);
    if (at >= whole) v = load_vector<false>(plain, at);
    v.hide(row.hidden_ids(at));
    if (!row.adjusts(at) && settle(v, at)) continue;
    for_candidates(v, at * V::kIds,
                   [&](int32_t id, float logit) { body(id, row.score(logit, id)); });
  }
}

// The same, and body() also for the ids that the row hides.
template <typename AnyRow, typename Settle, typename Body>
__device__ void for_scores(const AnyRow& row, ThreadVectors share, const Settle& settle,
                           const Body& body) {
  for_shown(row, share, settle, body);
  row.for_hidden(body);
}

// The thread's largest score: the first look at the row.
template <typename AnyRow>
__device__ float largest_score(const AnyRow& row, ThreadVectors share) {
  float best = -INFINITY;
  const auto take = [&](int32_t, float score) { best = fmaxf(best, score); };
  for_shown(
      row, share,
      [&](const auto& v, int) {
        best = fmaxf(best, largest(v));
        return true;
      },
      take);
  row.score_hidden();
  row.for_hidden(take);
  return best;
}

}  // namespace photon::cuda
