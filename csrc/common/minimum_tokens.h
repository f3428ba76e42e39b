// Stop ids that may not be sampled yet, because the row has a smallest number of tokens.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "segment.h"

namespace photon {

// How many leading entries of the row's stop_ids those are. The segment is sampled.
PHOTON_HOST_DEVICE inline int64_t num_muted_stops(const SampleParams& p, const Segment& s) {
  const int32_t* row = row_words(p.row_state, s.row);
  const int32_t until = row[kRowMutedUntil];
  if (until <= 0 || row[kRowRemaining] < until) return 0;
  return valid_entries(row[kRowStopCount], p.stop_ids);
}

}  // namespace photon
