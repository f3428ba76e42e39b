// A row as a filter sees it: ids at distances below the largest scaled logit (common/filter.h).
#pragma once
#include "common/filter.h"
#include "common/noise.h"
#include "cuda/logits_row.cuh"

namespace photon::cuda {

template <typename AnyRow>
struct ScaledRow {
  const AnyRow& row;
  const ThreadVectors share;
  const Noise& noise;
  float top;  // the largest scaled logit

  // kTooFar where there is no candidate, too.
  __device__ uint32_t distance_of(float score) const {
    return score > -INFINITY ? distance_below(top, noise.scaled(score)) : kTooFar;
  }

  // Calls body(id, scaled logit, distance) for those of the thread's ids that are not beyond
  // `limit`, which is at most kFarthest.
  template <typename Body>
  __device__ void for_near(uint32_t limit, const Body& body) const {
    for_scores(
        row, share, [&](const auto& v, int) { return distance_of(largest(v)) > limit; },
        [&](int32_t id, float score) {
          const uint32_t distance = distance_of(score);
          if (distance <= limit) body(id, noise.scaled(score), distance);
        });
  }
};

}  // namespace photon::cuda
