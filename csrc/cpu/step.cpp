// Head and tail of a step: begin_step, decode_meta_set, carry_over_ids, publish. Small integer
// tables; no threads.
#include <algorithm>
#include <cstdint>

#include "common/automaton.h"
#include "common/deltas.h"
#include "common/out_record.h"
#include "common/penalties.h"
#include "common/segment.h"
#include "common/token.h"
#include "cpu/kernels.h"

namespace photon::cpu {
namespace {

void apply_deltas(const BeginStepParams& p) {
  if (p.delta_words < 1) return;
  const int64_t runs = num_delta_runs(p);
  for (int64_t i = 0; i < runs; ++i) {
    const DeltaRun run = delta_run(p, i);
    for (int64_t i = 0; i < run.count; ++i) run.to[i] = run.word(i);
  }
  p.deltas[0] = 0;
}

void count_token(const TokenPlaces& at) {
  if (at.count != nullptr) *at.count = wrapping_add(*at.count, 1);
  if (at.seen != nullptr) *at.seen |= at.bit;
}

// Fills the tokens of one live segment and returns how far they reach: 1 + the last one. Where a
// token is missing, the row ends: its tokens stay dead, and the result is 0.
int64_t fill_segment(const BeginStepParams& p, const Segment& s) {
  int32_t* row = row_words(p.row_state(), s.row);
  bool missing = !fits_step(s, p.row_state(), p.num_tokens);
  const int32_t count = missing ? 0 : s.num_tokens;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t token_index = int64_t{s.first_token} + i;
    const int32_t token = take_token(s, p.row_state(), p.staged_ids, token_index);
    missing |= token == kNoToken;
    set_token(p.decode_meta, token_index, token, row[kRowPosition] + i, s.row);
  }
  if (!missing) {
    for (int32_t i = 0; i < count; ++i) count_token(answer_places(p, s, i));
    return last_token(s, p.num_tokens) + 1;
  }
  for (int32_t i = 0; i < count; ++i) clear_token(p.decode_meta, int64_t{s.first_token} + i);
  row[kRowAlive] = 0;
  return 0;
}

void write_record(int32_t* record, int64_t width, int32_t row, int32_t generation, int32_t tokens,
                  int32_t flags, int32_t token) {
  record[kRecordRow] = row;
  record[kRecordGeneration] = generation;
  record[kRecordNumTokens] = tokens;
  record[kRecordFlags] = flags;
  std::fill(record + kRecordTokens, record + width, -1);
  record[kRecordTokens] = token;
}

// Takes a token that is no stop id into the row's automaton, if it has one; returns the record's
// flags.
int32_t advance_automaton(const PublishParams& p, int32_t row, int32_t token) {
  const Automaton automaton = load_automaton(p.automata, p.row_state, row, 0);
  if (automaton.is_error) return kRecordAutomatonError;
  if (automaton.words == nullptr) return 0;
  const TokenText text = token_text(p.automata, token);
  if (text.ends)
    return (automaton.state_word(automaton.state) & kStateAccepting) != 0 ? kRecordComplete
                                                                          : kRecordAutomatonError;
  int32_t state = text.length > 0 ? automaton.state : kNoState;
  for (int32_t i = 0; i < text.length && state != kNoState; ++i)
    state = automaton.after(state, automaton.class_of(text.bytes[i]));
  if (state == kNoState) return kRecordAutomatonError;
  row_words(p.row_state, row)[kRowAutomatonState] = state;
  return (automaton.state_word(state) & kStateComplete) != 0 ? kRecordComplete : 0;
}

// Takes the sampled token into the row; returns the record's flags. One that the row's automaton
// forbids is not taken.
int32_t accept_token(const PublishParams& p, int32_t row, int32_t token) {
  int32_t* const state = row_words(p.row_state, row);
  const int32_t* const stops = row_words(p.stop_ids, row);
  const int64_t count = valid_entries(state[kRowStopCount], p.stop_ids);
  const bool stops_here = std::find(stops, stops + count, token) != stops + count;
  int32_t flags = stops_here ? kRecordStop : advance_automaton(p, row, token);
  if (flags == kRecordAutomatonError) {
    state[kRowAlive] = 0;
    return flags;
  }
  count_token(token_places(p.token_counts, p.seen_bits, p.row_state, row, token));
  state[kRowLastToken] = token;
  state[kRowRemaining] = wrapping_add(state[kRowRemaining], -1);
  if (flags == 0 && state[kRowRemaining] <= 0) flags = kRecordLength;
  if (flags != 0) state[kRowAlive] = 0;
  return flags;
}

}  // namespace

void begin_step(const BeginStepParams& p) {
  apply_deltas(p);
  std::fill(p.decode_meta, p.decode_meta + p.num_tokens * kMetaColumns, 0);
  int64_t counts[kCountsSize] = {};
  for (int64_t r = 0; r < p.num_segments; ++r) {
    const Segment s = load_segment(p.segments, r);
    if (!is_alive(p.row_state(), s.row, p.rows)) continue;
    const int64_t end = fill_segment(p, s);
    if ((s.flags & kSegmentStaged) == 0)
      counts[kCountDecodeTokens] = std::max(counts[kCountDecodeTokens], end);
    counts[kCountTokens] = std::max(counts[kCountTokens], end);
    if (end > 0 && (s.flags & kSegmentSample) != 0) counts[kCountSegments] = r + 1;
  }
  std::copy(counts, counts + kCountsSize, p.counts);
}

void carry_over_ids(const CarryOverIdsParams& p) {
  for (int64_t i = 0; i < p.n; ++i) {
    if (p.idx[i] >= 0 && p.idx[i] < p.num_prev) p.next[i] = p.prev[p.idx[i]];
  }
}

void decode_meta_set(const DecodeMetaSetParams& p) {
  for (int64_t i = 0; i < p.n; ++i) {
    if (is_position(p.positions[i])) {
      set_token(p.decode_meta, i, p.tokens[i], p.positions[i],
                p.rows != nullptr ? p.rows[i] : static_cast<int32_t>(i));
    } else {
      clear_token(p.decode_meta, i);
    }
  }
}

void publish(const PublishParams& p) {
  for (int64_t r = 0; r < p.num_segments; ++r) {
    const Segment s = load_segment(p.segments, r);
    int32_t* record = p.out_record + r * p.record_width;
    int32_t* row = is_row(s.row, p.rows) ? row_words(p.row_state, s.row) : nullptr;
    const int32_t generation = row != nullptr ? row[kRowGeneration] : 0;
    if (!is_alive(p.row_state, s.row, p.rows)) {
      write_record(record, p.record_width, s.row, generation, 0, kRecordDead, -1);
      continue;
    }
    row[kRowPosition] = wrapping_add(row[kRowPosition], s.num_tokens);
    if ((s.flags & kSegmentSample) == 0) {
      write_record(record, p.record_width, s.row, generation, 0, 0, -1);
      continue;
    }
    const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
    const int32_t token = p.sampled[r];
    if (errors != 0 || token < 0) {
      const bool lost = load_automaton(p.automata, p.row_state, s.row, 0).is_error;
      row[kRowAlive] = 0;
      write_record(record, p.record_width, s.row, generation, 0,
                   errors != 0 ? errors
                   : lost      ? kRecordAutomatonError
                               : kRecordNoCandidate,
                   -1);
      continue;
    }
    const int32_t flags = accept_token(p, s.row, token);
    const bool taken = flags != kRecordAutomatonError;
    write_record(record, p.record_width, s.row, generation, taken, flags, taken ? token : -1);
  }
}

}  // namespace photon::cpu
