// row_state: int32 [rows, 32], the persistent state of a live sequence on the device. Row 0 is
// padding and never alive. Only the compute stream writes it: begin_step_ (host deltas, and the end
// of rows whose tokens are missing) and publish_ (results). A new column never changes an op's
// signature. Columns without a name are reserved, and zero.
#pragma once
#include <cstdint>

namespace photon {

enum RowColumn : int32_t {
  kRowLastToken = 0,  // the token that the next decode step feeds
  kRowPosition = 1,   // where that token goes in the KV cache: the number of tokens already written
  kRowRemaining = 2,  // tokens that may still be sampled
  kRowAlive = 3,      // 1: takes part in steps; 0: finished, aborted, ended by an error, or free
  kRowGeneration = 4,   // which lease holds the row; echoed in output records
  kRowStopCount = 5,    // how many leading entries of the row's stop_ids are valid
  kRowTemperature = 6,  // float32 bits; 0 is greedy
  kRowSeedLow = 7,
  kRowSeedHigh = 8,
  kRowConstraint = 9,  // RowConstraint
  kRowLoraSlot = 10,
  kRowTopK = 11,               // not above 0: off
  kRowTopP = 12,               // float32 bits; off unless in (0, 1)
  kRowMinP = 13,               // float32 bits; off unless in (0, 1]
  kRowStopAfter = 14,          // stop ids are suppressed while remaining >= this; 0: never
  kRowRepetitionPenalty = 15,  // float32 bits; 1, or not above 0: off
  kRowPresencePenalty = 16,    // float32 bits; 0: off
  kRowFrequencyPenalty = 17,   // float32 bits; 0: off
  kRowBiasCount = 18,          // how many leading pairs of the row's biases are valid
  kRowAnswerBegin = 19,        // staged tokens from this position on are of the answer
  kRowLogprobs =
      20,  // 1 + how many of the likeliest ids get their log-probability; not above 0: off
  kRowObjectValues = 21,    // values of each object in a spatial answer (spatial.h); 0: it is text
  kRowAutomaton = 24,       // where its automaton begins (automaton.h); 0: it has none
  kRowAutomatonState = 25,  // of it; publish_ advances it
  kRowColumns = 32,
};

enum RowConstraint : int32_t { kHostMask = 1 };  // 0: there is none

// The device tables of the rows are one list: row_state, page_table, stop_ids, then extension
// tables. Each is int32 [rows, words of a row]. A new table changes no op's signature.
constexpr int32_t kMaxTables = 8;

// Host deltas: int32 [D], the packed list of words to write before a step. Word 0 is the number of
// runs; run i is four words from word 4 + 4 * i: (table, offset in words, count, index of its first
// payload word in this buffer). A table is named by its place in the list. Runs do not overlap. An
// index of kDeltaZeros writes zeros.
enum DeltaTable : int32_t {
  kTableRowState = 0,
  kTablePages = 1,
  kTableStopIds = 2,
  kTableBiases = 3,       // pairs of id and float32 bits, ids ascending
  kTableTokenCounts = 4,  // how often each id is in the row's answer, for rows with penalties
  kTableSeenBits = 5,  // bit (id & 31) of word (id >> 5): the id is in the prompt or was counted;
                       // likewise
  kDeltaTables = 6
};
constexpr int32_t kLeastTables = 3;  // that a list has; a row has nothing in those that are missing
constexpr int32_t kDeltaHeader = 4;
constexpr int32_t kDeltaRunWords = 4;
constexpr int32_t kDeltaZeros = -1;

}  // namespace photon
