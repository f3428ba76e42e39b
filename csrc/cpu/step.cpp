// Head and tail of a step: begin_step, decode_meta_set, carry_over_ids, publish. Small integer tables; no threads.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

#include "common/decode_meta.h"
#include "common/out_record.h"
#include "common/row_state.h"
#include "cpu/kernels.h"

namespace photon::cpu {
namespace {

void apply_deltas(const BeginStepParams& p) {
  if (p.delta_words < 1) return;
  const int64_t runs = std::min<int64_t>(p.deltas[0], (p.delta_words - kDeltaHeader) / kDeltaRunWords);
  int32_t* const tables[kDeltaTables] = {p.row_state, p.page_table, p.stop_ids};
  const int64_t words[kDeltaTables] = {p.rows * kRowColumns, p.rows * p.pages_per_row, p.rows * p.stops_per_row};
  for (int64_t i = 0; i < runs; ++i) {
    const int32_t* run = p.deltas + kDeltaHeader + kDeltaRunWords * i;
    const int64_t table = run[0], offset = run[1], count = run[2], payload = run[3];
    if (table < 0 || table >= kDeltaTables || offset < 0 || count < 0 || payload < 0) continue;
    if (offset + count > words[table] || payload + count > p.delta_words) continue;
    std::memcpy(tables[table] + offset, p.deltas + payload, static_cast<size_t>(count) * sizeof(int32_t));
  }
  p.deltas[0] = 0;
}

void set_line(int32_t* line, int32_t token, int32_t position, int32_t row) {
  line[kMetaToken] = token;
  line[kMetaPosition] = position;
  line[kMetaLength] = position + 1;
  line[kMetaRow] = row;
}

// Fills the lines of one live segment; returns 1 + the last line that is alive, or 0.
int64_t fill_segment(const BeginStepParams& p, const int32_t* segment, const int32_t* state) {
  const bool staged = (segment[kSegmentFlags] & kSegmentStaged) != 0;
  const int64_t first = segment[kSegmentFirstLine];
  const int64_t lines = staged ? segment[kSegmentNumLines] : std::min(segment[kSegmentNumLines], 1);
  int64_t end = 0;
  for (int64_t i = std::max<int64_t>(0, -first); i < lines && first + i < p.num_lines; ++i) {
    const int64_t line = first + i, position = state[kRowPosition] + i;
    int32_t token = state[kRowLastToken];
    if (staged) {
      token = p.staged_ids[line];
      p.staged_ids[line] = kNoToken;
    }
    if (token == kNoToken || position < 0 || position >= INT32_MAX) continue;
    set_line(p.decode_meta + line * kMetaColumns, token, static_cast<int32_t>(position), segment[kSegmentRow]);
    end = line + 1;
  }
  return end;
}

struct RowView {
  int32_t* state;  // null: the index is outside the table
  bool alive;
};

RowView view_row(int32_t* row_state, int64_t rows, int32_t row) {
  if (row < 0 || row >= rows) return {nullptr, false};
  int32_t* state = row_state + int64_t{row} * kRowColumns;
  return {state, row > 0 && state[kRowAlive] != 0};
}

int32_t wrapping_add(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }

void write_record(int32_t* record, int64_t width, int32_t row, int32_t generation, int32_t tokens, int32_t flags, int32_t token) {
  record[kRecordRow] = row;
  record[kRecordGeneration] = generation;
  record[kRecordNumTokens] = tokens;
  record[kRecordFlags] = flags;
  std::fill(record + kRecordTokens, record + width, -1);
  record[kRecordTokens] = token;
}

// Takes the sampled token into the row; returns the record's flags.
int32_t take_token(int32_t* state, const int32_t* stops, int64_t stops_per_row, int32_t token) {
  state[kRowLastToken] = token;
  state[kRowRemaining] = wrapping_add(state[kRowRemaining], -1);
  const int64_t count = std::clamp<int64_t>(state[kRowStopCount], 0, stops_per_row);
  int32_t flags = 0;
  if (std::find(stops, stops + count, token) != stops + count) {
    flags = kRecordStop;
  } else if (state[kRowRemaining] <= 0) {
    flags = kRecordLength;
  }
  if (flags != 0) state[kRowAlive] = 0;
  return flags;
}

}  // namespace

void begin_step(const BeginStepParams& p) {
  apply_deltas(p);
  std::fill(p.decode_meta, p.decode_meta + p.num_lines * kMetaColumns, 0);
  int64_t live_lines = 0, live_segments = 0;
  for (int64_t r = 0; r < p.num_segments; ++r) {
    const int32_t* segment = p.segments + r * kSegmentColumns;
    const RowView row = view_row(p.row_state, p.rows, segment[kSegmentRow]);
    if (!row.alive) continue;
    live_lines = std::max(live_lines, fill_segment(p, segment, row.state));
    if ((segment[kSegmentFlags] & kSegmentSample) != 0) live_segments = r + 1;
  }
  p.extent[kExtentLines] = static_cast<int32_t>(live_lines);
  p.extent[kExtentSegments] = static_cast<int32_t>(live_segments);
}

void carry_over_ids(const CarryOverIdsParams& p) {
  for (int64_t i = 0; i < p.n; ++i) {
    if (p.idx[i] >= 0 && p.idx[i] < p.num_prev) p.next[i] = p.prev[p.idx[i]];
  }
}

void decode_meta_set(const DecodeMetaSetParams& p) {
  for (int64_t i = 0; i < p.n; ++i) {
    int32_t* line = p.decode_meta + i * kMetaColumns;
    if (p.positions[i] < 0 || p.positions[i] == INT32_MAX) {
      std::fill(line, line + kMetaColumns, 0);
    } else {
      set_line(line, p.tokens[i], p.positions[i], p.rows != nullptr ? p.rows[i] : static_cast<int32_t>(i));
    }
  }
}

void publish(const PublishParams& p) {
  for (int64_t r = 0; r < p.num_segments; ++r) {
    const int32_t* segment = p.segments + r * kSegmentColumns;
    int32_t* record = p.out_record + r * p.record_width;
    const int32_t index = segment[kSegmentRow];
    const RowView row = view_row(p.row_state, p.rows, index);
    const int32_t generation = row.state != nullptr ? row.state[kRowGeneration] : 0;
    if (!row.alive) {
      write_record(record, p.record_width, index, generation, 0, kRecordDead, -1);
      continue;
    }
    row.state[kRowPosition] = wrapping_add(row.state[kRowPosition], segment[kSegmentNumLines]);
    if ((segment[kSegmentFlags] & kSegmentSample) == 0) {
      write_record(record, p.record_width, index, generation, 0, 0, -1);
      continue;
    }
    const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
    const int32_t token = p.sampled[r];
    if (errors != 0 || token < 0) {
      row.state[kRowAlive] = 0;
      write_record(record, p.record_width, index, generation, 0, errors != 0 ? errors : kRecordNoCandidate, -1);
      continue;
    }
    const int32_t flags = take_token(row.state, p.stop_ids + int64_t{index} * p.stops_per_row, p.stops_per_row, token);
    write_record(record, p.record_width, index, generation, 1, flags, token);
  }
}

}  // namespace photon::cpu
