// What a row adds to the logits of single ids, and takes from those that it has had: logit biases,
// then penalties, in float32.
//
// Where a row has seen bits for an id (params.h), an id whose bit is not set has no count.
#pragma once
#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "segment.h"

namespace photon {

struct Penalties {
  float
      repetition;  // of ids in prompt or answer: above 0 logits are divided by it, below multiplied
  float presence, frequency;  // of ids in the answer: taken off once, and each time that they came

  PHOTON_HOST_DEVICE bool on() const {
    return (repetition > 0.0f && repetition != 1.0f) || presence != 0.0f || frequency != 0.0f;
  }
};

// The row must be in the tables.
PHOTON_HOST_DEVICE inline Penalties load_penalties(const int32_t* row_state, int32_t row) {
  const int32_t* words = row_words(row_state, row);
  return {float_word(words, kRowRepetitionPenalty), float_word(words, kRowPresencePenalty),
          float_word(words, kRowFrequencyPenalty)};
}

// Where a row counts a token of its answer, and where its bit is among the ids that it has had.
struct TokenPlaces {
  int32_t* count;  // null: nowhere
  int32_t* seen;   // the word; null: nowhere
  int32_t bit;     // of the word
};

PHOTON_HOST_DEVICE inline TokenPlaces token_places(const RowWords& token_counts,
                                                   const RowWords& seen_bits,
                                                   const int32_t* row_state, int32_t row,
                                                   int32_t token) {
  if (token < 0 || token >= token_counts.width || !load_penalties(row_state, row).on())
    return {nullptr, nullptr, 0};
  int32_t* const seen =
      token / 32 < seen_bits.width ? row_words(seen_bits, row) + token / 32 : nullptr;
  return {row_words(token_counts, row) + token, seen, static_cast<int32_t>(1u << token % 32)};
}

// The same of a segment's token that decode_meta has: nowhere for those of the prompt, and for one
// that is carried over, which was counted when it was sampled.
PHOTON_HOST_DEVICE inline TokenPlaces answer_places(const BeginStepParams& p, const Segment& s,
                                                    int32_t index) {
  const int32_t* row = row_words(p.row_state(), s.row);
  if ((s.flags & kSegmentStaged) == 0 || row[kRowPosition] + index < row[kRowAnswerBegin])
    return {nullptr, nullptr, 0};
  const int64_t token = static_cast<int64_t>(s.first_token) + index;
  return token_places(p.token_counts(), p.seen_bits(), p.row_state(), s.row,
                      p.decode_meta[token * kMetaColumns + kMetaToken]);
}

// What stands between a row's logits and what is sampled.
struct Adjustment {
  const int32_t* biases;  // [num_biases, 2]
  int32_t num_biases;
  Penalties penalties;
  const int32_t* counts;  // [counted_ids]
  const int32_t* seen_bits;
  int64_t counted_ids, seen_ids;  // others have none

  PHOTON_HOST_DEVICE bool on() const { return num_biases > 0 || counts != nullptr; }

  // The place of the first bias whose id is not below this one.
  PHOTON_HOST_DEVICE int32_t bias_place(int32_t id) const {
    int32_t begin = 0, end = num_biases;
    while (begin < end) {
      const int32_t middle = begin + (end - begin) / 2;
      if (biases[2 * middle] < id)
        begin = middle + 1;
      else
        end = middle;
    }
    return begin;
  }

  // The bits of the 32 ids among which this one is; it is below seen_ids.
  PHOTON_HOST_DEVICE uint32_t seen_word(int32_t id) const {
    return static_cast<uint32_t>(seen_bits[id >> 5]);
  }

  PHOTON_HOST_DEVICE bool is_seen(int32_t id) const {
    return id < seen_ids && (seen_word(id) >> (id & 31) & 1u) != 0;
  }

  PHOTON_HOST_DEVICE int32_t count_of(int32_t id) const {
    return id < counted_ids ? counts[id] : 0;
  }

  // Of an id that came so often, and is `seen` where it came or is in the prompt.
  PHOTON_HOST_DEVICE float penalized(float logit, int32_t count, bool seen) const {
    if (penalties.repetition > 0.0f && seen)
      logit = logit > 0.0f ? logit / penalties.repetition : logit * penalties.repetition;
    if (count <= 0) return logit;
    return fmaf(-penalties.frequency, static_cast<float>(count), logit) - penalties.presence;
  }

  PHOTON_HOST_DEVICE float biased(float logit, int32_t id) const {
    const int32_t place = bias_place(id);
    const bool has_bias = place < num_biases && biases[2 * place] == id;
    return has_bias ? logit + float_word(biases, 2 * place + 1) : logit;
  }

  PHOTON_HOST_DEVICE float adjusted(float logit, int32_t id) const {
    logit = biased(logit, id);
    if (counts == nullptr) return logit;
    const int32_t count = count_of(id);
    const bool has_bit = is_seen(id);  // whatever the count: neither load waits for the other
    return penalized(logit, count, count > 0 || has_bit);
  }
};

// The row must be in the tables.
PHOTON_HOST_DEVICE inline Adjustment load_adjustment(const SampleParams& p, int32_t row) {
  Adjustment found{};
  found.num_biases =
      static_cast<int32_t>(valid_entries(row_words(p.row_state, row)[kRowBiasCount], p.biases, 2));
  if (found.num_biases > 0) found.biases = row_words(p.biases, row);
  found.penalties = load_penalties(p.row_state, row);
  if (p.token_counts.words == nullptr || !found.penalties.on()) return found;
  found.counts = row_words(p.token_counts, row);
  found.counted_ids = p.token_counts.width;
  if (p.seen_bits.words == nullptr) return found;
  found.seen_bits = row_words(p.seen_bits, row);
  found.seen_ids = p.seen_bits.width * 32;
  return found;
}

}  // namespace photon
