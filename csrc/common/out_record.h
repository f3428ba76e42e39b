// out_record: int32 [R, W], W >= 5: what a step says about each of its segments; copied to pinned
// memory for the commit.
#pragma once
#include <cstdint>

namespace photon {

enum RecordColumn : int32_t {
  kRecordRow = 0,
  kRecordGeneration = 1,
  kRecordNumTokens = 2,
  kRecordFlags = 3,
  kRecordTokens = 4,  // n_tokens ids; -1 in the columns that hold none
};

enum RecordFlag : int32_t {
  kRecordStop = 1,    // the token is one of the row's stop ids
  kRecordLength = 2,  // the row has used its last remaining token
  kRecordDead = 4,  // the row was not alive: a zombie, padding, or ended by begin_step_ for want of
                    // tokens; nothing was sampled
  kRecordMaskError = 8,  // the row's mask was missing, or its key named another row or position, or
                         // no place
  kRecordNoCandidate =
      16,  // no token had a finite logit: the mask allows nothing, or the logits are NaN
  kRecordComplete = 32,        // the row's automaton allows nothing behind the token
  kRecordAutomatonError = 64,  // the row's automaton or its state is none, or forbids the token
};

// mask_keys: int32 [R, 3], (row, position of the token whose logits are masked, place of its mask
// among the masks that were written). Row 0: no mask for this segment.
enum MaskKey : int32_t { kMaskRow = 0, kMaskPosition = 1, kMaskPlace = 2, kMaskKeyColumns = 3 };

// row_errors: int32 [R], RecordFlag bits that apply_token_mask_ and sample_into raise for publish_
// to report; 0 is fine.

// logprobs: int32 [R, 1 + 2 * n]: for rows that ask, the bits of the sampled id's log-probability,
// then the likeliest ids in order, each with the bits of its own; id -1: there are no more.
enum LogprobColumn : int32_t { kLogprobSampled = 0, kLogprobTop = 1 };
constexpr int32_t kMostLogprobs = 20;

}  // namespace photon
