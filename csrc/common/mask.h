// Whether a segment's mask is applied to its logits.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "out_record.h"
#include "params.h"
#include "segment.h"

namespace photon {

struct MaskVerdict {
  bool apply;
  int32_t error;  // RecordFlag bits
};

// A mask is applied only if its key names this segment's row and the position of its sampled token;
// a missing or stale one is an error.
PHOTON_HOST_DEVICE inline MaskVerdict judge_mask(const ApplyTokenMaskParams& p, int64_t index) {
  const Segment s = load_segment(p.segments, index);
  if (!is_sampled(s, p.row_state, p.rows)) return {false, 0};
  const int32_t* key = p.mask_keys + index * kMaskKeyColumns;
  if (key[kMaskRow] == 0) {
    return {false,
            row_words(p.row_state, s.row)[kRowConstraint] == kHostMask ? kRecordMaskError : 0};
  }
  const bool matches =
      key[kMaskRow] == s.row && key[kMaskPosition] == last_position(s, p.row_state);
  return {matches, matches ? 0 : kRecordMaskError};
}

}  // namespace photon
