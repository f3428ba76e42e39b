// Which mask is applied to a segment's logits.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "out_record.h"
#include "params.h"
#include "segment.h"

namespace photon {

struct MaskVerdict {
  const int32_t* mask;  // [mask_words]; null: the logits stay as they are
  int32_t error;        // RecordFlag bits
};

// A mask is applied only if its key names this segment's row, the position of its sampled token,
// and a place among the masks. One that is missing, stale, or nowhere is an error.
PHOTON_HOST_DEVICE inline MaskVerdict judge_mask(const ApplyTokenMaskParams& p, int64_t index) {
  const Segment s = load_segment(p.segments, index);
  if (!is_sampled(s, p.row_state, p.rows)) return {nullptr, 0};
  const int32_t* key = p.mask_keys + index * kMaskKeyColumns;
  if (key[kMaskRow] == 0) {
    return {nullptr,
            row_words(p.row_state, s.row)[kRowConstraint] == kHostMask ? kRecordMaskError : 0};
  }
  const int32_t place = key[kMaskPlace];
  const bool matches = key[kMaskRow] == s.row &&
                       key[kMaskPosition] == last_position(s, p.row_state) && place >= 0 &&
                       place < p.num_masks;
  if (!matches) return {nullptr, kRecordMaskError};
  return {p.mask + place * p.mask_words, 0};
}

}  // namespace photon
