// A row as a filter sees it: ids at distances below the largest scaled logit (common/filter.h).
#pragma once
#include "common/filter.h"
#include "common/noise.h"
#include "cuda/sampling/logits_row.cuh"

namespace photon::cuda {

template <typename AnyRow>
struct ScaledRow {
  const AnyRow& row;
  const ThreadVectors share;
  const float divisor;
  const float top;  // the largest scaled logit

  __device__ float scaled(float score) const { return scaled_logit(score, divisor); }

  // kTooFar where there is no candidate, too.
  __device__ uint32_t distance_of(float score) const {
    return score > -INFINITY ? distance_below(top, scaled(score)) : kTooFar;
  }

  // Scores below this one are beyond `limit`. It is lower than it need be, by more than all that is
  // rounded; NaN where that cannot be told.
  __device__ float surely_beyond(uint32_t limit) const {
    constexpr float kSlack = 0x1p-19f;
    const float below = (static_cast<float>(limit) + 1.0f) * (1.0f / kDistanceUnits);
    const float lowest = top - below - (fabsf(top) + below) * kSlack;
    return lowest * divisor - fabsf(lowest * divisor) * kSlack;
  }

  // Calls body(id, scaled logit, distance) for those of the thread's ids that are not beyond
  // `limit`, which is at most kFarthest.
  template <typename Body>
  __device__ void for_near(uint32_t limit, const Body& body) const {
    const float beyond = surely_beyond(limit);
    for_scores(
        row, share, [&](const auto& v, int) { return largest(v) < beyond; },
        [&](int32_t id, float score) {
          if (score < beyond) return;
          const uint32_t distance = distance_of(score);
          if (distance <= limit) body(id, scaled(score), distance);
        });
  }
};

}  // namespace photon::cuda
