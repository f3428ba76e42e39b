// A row of logits as the threads of a CTA or of a cluster read it, and the largest of it.
#pragma once
#include <cmath>
#include <type_traits>

#include "common/params.h"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_reduce.cuh"

namespace photon::cuda {

constexpr int kScoreLoads = 3;  // the same where there is more than the largest logit to find
constexpr int kSampleLoads =
    5;  // vectors that a thread has under way; all of a cluster are 163,840 ids of 16 bits

// The logits of kVectorBytes; -inf past the end of the row.
template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kIds = kVectorBytes / sizeof(T);
  T of_id[kIds];
};

template <typename T>
struct Row {
  using Element = T;

  const T* logits;
  int32_t vocab;

  // What is sampled of a logit of an id that is not hidden.
  __device__ float score(float logit, int32_t) const { return logit; }

  // As those of AdjustedRow and HidingRow.
  __device__ bool adjusts(int) const { return false; }
  __device__ void hide(Vector<T>&, int) const {}
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

// Takes the largest logit of the vectors begin .. end - 1, of which there may be none, if it is
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

// Looks at the thread's vectors. Where the logits of one are what is sampled, settle(v, vector)
// says whether it is done with as a whole; for each id of the others body(id, score) is called; ids
// past the end of the row, and those that a row hides, score -inf.
template <typename AnyRow, typename Settle, typename Body>
__device__ void for_shown(const AnyRow& row, ThreadVectors share, const Settle& settle,
                          const Body& body) {
  using T = typename AnyRow::Element;
  constexpr int kIds = Vector<T>::kIds;
  const Row<T>& plain = row;
  const int whole = is_vector_aligned(row.logits) ? row.vocab / kIds : 0;
  const int end = static_cast<int>(ceil_div(row.vocab, kIds));
  for (int begin = share.first; begin < end; begin += kScoreLoads * share.step) {
    Vector<T> v[kScoreLoads];
    uint32_t left = 0;  // of these vectors those whose ids are looked at, as bits
    if (whole > 0) {
#pragma unroll
      for (int i = 0; i < kScoreLoads; ++i)
        v[i] = load_vector<true>(plain, min(begin + i * share.step, whole - 1));
    }
#pragma unroll
    for (int i = 0; i < kScoreLoads; ++i) {
      const int at = begin + i * share.step;
      if (at < whole) row.hide(v[i], at);
      if (at < end && (at >= whole || row.adjusts(at) || !settle(v[i], at))) left |= 1u << i;
    }
    for (; left != 0; left &= left - 1) {
      const int at = begin + (__ffs(left) - 1) * share.step, first = at * kIds;
      Vector<T> own = at < whole ? load_vector<true>(plain, at) : load_vector<false>(plain, at);
      row.hide(own, at);
#pragma unroll
      for (int i = 0; i < kIds; ++i) body(first + i, row.score(to_float(own.of_id[i]), first + i));
    }
  }
}

// The same, and body() also for the ids that the row hides.
template <typename AnyRow, typename Settle, typename Body>
__device__ void for_scores(const AnyRow& row, ThreadVectors share, const Settle& settle,
                           const Body& body) {
  for_shown(row, share, settle, body);
  row.for_hidden(body);
}

}  // namespace photon::cuda
