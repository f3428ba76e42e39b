// A segment of the step and the row behind it, read with every index checked: garbage in a table makes a segment dead, never a fault.
#pragma once
#include <cstdint>

#include "common/decode_meta.h"
#include "common/row_state.h"

namespace photon::cuda {

struct Segment {
  int32_t row, first_line, num_lines, flags;
};

__device__ inline Segment load_segment(const int32_t* segments, int64_t index) {
  const int32_t* s = segments + index * kSegmentColumns;
  return {s[kSegmentRow], s[kSegmentFirstLine], s[kSegmentNumLines], s[kSegmentFlags]};
}

// The row is in the tables. Row 0 is, but it is padding.
__device__ inline bool is_row(int32_t row, int64_t rows) { return row >= 0 && row < rows; }

// A line of row_state.
template <typename Int>
__device__ inline Int* row_line(Int* row_state, int32_t row) {
  return row_state + static_cast<int64_t>(row) * kRowColumns;
}

__device__ inline bool is_alive(const int32_t* row_state, int32_t row, int64_t rows) {
  return row != 0 && is_row(row, rows) && row_line(row_state, row)[kRowAlive] != 0;
}

// The segment's logits are to be sampled in this step.
__device__ inline bool is_sampled(const Segment& s, const int32_t* row_state, int64_t rows) {
  return (s.flags & kSegmentSample) != 0 && is_alive(row_state, s.row, rows);
}

// Overflow of garbage wraps around.
__device__ inline int32_t wrapping_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

// Position of the segment's last line, whose logits are sampled. The row must be in the tables.
__device__ inline int32_t last_position(const Segment& s, const int32_t* row_state) {
  return wrapping_add(wrapping_add(row_line(row_state, s.row)[kRowPosition], s.num_lines), -1);
}

}  // namespace photon::cuda
