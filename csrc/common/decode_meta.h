// decode_meta: int32 [T, 4], one entry per token of a step. segments: int32 [R, 4], one entry per
// row of a step. Kernels read token, position and length from here, never from launch arguments, so
// that one captured graph serves every step. Both are device memory; decode_meta is written by the
// head of the graph (begin_step_), segments by the host (staged per slot).
#pragma once
#include <climits>
#include <cstdint>

namespace photon {

// Columns of decode_meta. length == position + 1 for a live token; a dead or padding token is (0,
// 0, 0, 0): length 0 is the only test of liveness that a kernel needs.
enum MetaColumn : int32_t {
  kMetaToken = 0,
  kMetaPosition = 1,
  kMetaLength = 2,
  kMetaRow = 3,
  kMetaColumns = 4
};

// Columns of segments. A decode row has one token, a prefill chunk many; tokens of a segment are
// consecutive.
enum SegmentColumn : int32_t {
  kSegmentRow = 0,
  kSegmentFirstToken = 1,
  kSegmentNumTokens = 2,
  kSegmentFlags = 3,
  kSegmentColumns = 4
};

enum SegmentFlag : int32_t {
  kSegmentSample = 1,  // logits of the last token are sampled
  kSegmentStaged =
      4,  // tokens come from staged_ids; otherwise the row's last_token is carried over
};

// A staged token that was consumed, or was never written. A step cannot feed it: begin_step_ ends
// the row (alive = 0) whose segment lacks a token, or has no tokens, or has tokens outside the
// step. All tokens of that segment are dead, nothing of the row is sampled, its position stays, and
// publish_ records kRecordDead. Of a row that the host believes alive, that record is proof of
// corruption; the alternative would be a token sampled from the logits of some earlier step.
constexpr int32_t kNoToken = INT32_MIN;

// counts: int32 [3], written by begin_step_: 1 + the last live token that was carried over (a
// decode token), 1 + the last live token, 1 + the last sampled segment whose tokens are alive.
// Kernels that read weights process only this many leading tokens (or segments) and return at once
// when it is zero, so that a step of dead rows costs almost nothing. A step's decode tokens stand
// before its chunks: in a mixed step the attention of decode tokens takes the tokens below the
// first count, and the attention of chunks takes those from it on.
enum Counts : int32_t {
  kCountDecodeTokens = 0,
  kCountTokens = 1,
  kCountSegments = 2,
  kCountsSize = 3
};

}  // namespace photon
