// A segment of the step and the row behind it, read with every index checked: garbage in a table
// makes a segment dead, never a fault.
#pragma once
#include <cstdint>
#include <cstring>

#include "decode_meta.h"
#include "host_device.h"
#include "params.h"
#include "row_state.h"
#include "token.h"

namespace photon {

struct Segment {
  int32_t row, first_token, num_tokens, flags;
};

PHOTON_HOST_DEVICE inline Segment load_segment(const int32_t* segments, int64_t index) {
  const int32_t* s = segments + index * kSegmentColumns;
  return {s[kSegmentRow], s[kSegmentFirstToken], s[kSegmentNumTokens], s[kSegmentFlags]};
}

// The row is in the tables. Row 0 is, but it is padding.
PHOTON_HOST_DEVICE inline bool is_row(int32_t row, int64_t rows) { return row >= 0 && row < rows; }

// A row's words of row_state.
template <typename Int>
PHOTON_HOST_DEVICE inline Int* row_words(Int* row_state, int32_t row) {
  return row_state + static_cast<int64_t>(row) * kRowColumns;
}

// A row's words of another table.
PHOTON_HOST_DEVICE inline int32_t* row_words(const RowWords& table, int32_t row) {
  return table.words + row * table.width;
}

// How many of `count` entries of `size` words, a number from the device, the table has room for.
PHOTON_HOST_DEVICE inline int64_t valid_entries(int32_t count, const RowWords& table,
                                                int64_t size = 1) {
  const int64_t room = table.width / size;
  return count < 0 ? 0 : count < room ? count : room;
}

// A column that holds the bits of a float32.
PHOTON_HOST_DEVICE inline float float_word(const int32_t* row, int32_t column) {
  float value;
  memcpy(&value, row + column, sizeof(value));
  return value;
}

PHOTON_HOST_DEVICE inline bool is_alive(const int32_t* row_state, int32_t row, int64_t rows) {
  return row != 0 && is_row(row, rows) && row_words(row_state, row)[kRowAlive] != 0;
}

// The segment's logits are to be sampled in this step.
PHOTON_HOST_DEVICE inline bool is_sampled(const Segment& s, const int32_t* row_state,
                                          int64_t rows) {
  return (s.flags & kSegmentSample) != 0 && is_alive(row_state, s.row, rows);
}

// Overflow of garbage wraps around.
PHOTON_HOST_DEVICE inline int32_t wrapping_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

// Position of the segment's last token, whose logits are sampled. The row must be in the tables.
PHOTON_HOST_DEVICE inline int32_t last_position(const Segment& s, const int32_t* row_state) {
  return wrapping_add(wrapping_add(row_words(row_state, s.row)[kRowPosition], s.num_tokens), -1);
}

// The segment's last token in a step of `num_tokens` tokens; -1: it has none.
PHOTON_HOST_DEVICE inline int64_t last_token(const Segment& s, int64_t num_tokens) {
  const int64_t last = static_cast<int64_t>(s.first_token) + s.num_tokens - 1;
  return s.num_tokens > 0 && last >= 0 && last < num_tokens ? last : -1;
}

// The segment has one token at least, and each has a place in the step and a
// position in its row; a token that is carried over makes one token. The row must be in the tables.
PHOTON_HOST_DEVICE inline bool fits_step(const Segment& s, const int32_t* row_state,
                                         int64_t num_tokens) {
  const int64_t first_position = row_words(row_state, s.row)[kRowPosition];
  const bool countable = (s.flags & kSegmentStaged) != 0 || s.num_tokens == 1;
  return countable && s.first_token >= 0 && last_token(s, num_tokens) >= 0 &&
         is_position(first_position) && is_position(first_position + s.num_tokens - 1);
}

// The id that one token of a segment that fits is fed. Staged tokens are consumed: read once, then
// gone. kNoToken: there is none.
PHOTON_HOST_DEVICE inline int32_t take_token(const Segment& s, const int32_t* row_state,
                                             int32_t* staged_ids, int64_t token_index) {
  if ((s.flags & kSegmentStaged) == 0) return row_words(row_state, s.row)[kRowLastToken];
  const int32_t token = staged_ids[token_index];
  staged_ids[token_index] = kNoToken;
  return token;
}

}  // namespace photon
