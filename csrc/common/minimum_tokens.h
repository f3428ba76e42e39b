// Stop ids are suppressed until a row has its minimum number of tokens.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "segment.h"

namespace photon {

// How many leading entries of the row's stop_ids are suppressed. The segment is sampled.
PHOTON_HOST_DEVICE inline int64_t num_suppressed_stops(const SampleParams& p, const Segment& s) {
  const int32_t* row = row_words(p.row_state, s.row);
  const int32_t after = row[kRowStopAfter];
  if (after <= 0 || row[kRowRemaining] < after) return 0;
  return valid_entries(row[kRowStopCount], p.stop_ids);
}

}  // namespace photon
