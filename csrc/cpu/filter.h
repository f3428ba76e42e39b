// Sampling of a row that has a filter.
#pragma once
#include <cstdint>

#include "common/params.h"

namespace photon::cpu {

// The id that segment r draws of those that its filter keeps; -1: there is no candidate. The
// segment is sampled, and its row is not greedy.
int32_t filtered_token(const SampleParams& p, int64_t r);

}  // namespace photon::cpu
