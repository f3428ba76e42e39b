// One POD params struct per op: the only currency between the torch edge (csrc/ops), the CPU
// kernels, the CUDA launchers and recorded host graphs. (Others are in linear.h, embedding.h,
// lora.h and spatial.h.) Pointers are raw; strides are in elements; the innermost dimension of
// every tensor is contiguous unless a stride says otherwise. Shapes are checked once, at the edge.
// Nothing here owns memory.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "host_device.h"
#include "row_state.h"

namespace photon {

// --- step head and tail: int32 tables ------------------------------------------------------------

struct Table {
  int32_t* words;
  int64_t size;  // words
};

// A table of the rows, by row.
struct RowWords {
  int32_t* words;  // [rows, width]; null: there is none, and width is 0
  int64_t width;
};

// The words of all automata (automaton.h).
struct AutomataWords {
  const int32_t* words;  // [size]; null: rows have none
  int64_t size;
};

struct BeginStepParams {
  Table tables[kMaxTables];  // of rows, numbered as in DeltaTable; all are written by the deltas
  int32_t num_tables;
  int32_t* deltas;          // [delta_words]; applied, then its run count is zeroed
  const int32_t* segments;  // [num_segments, 4]
  int32_t* staged_ids;      // [num_tokens]; read tokens are replaced by kNoToken
  int32_t* decode_meta;     // [num_tokens, 4]
  int32_t* counts;          // [3]
  int64_t rows, delta_words, num_segments, num_tokens;

  // [rows, kRowColumns]; rows whose segment lacks a token end.
  PHOTON_HOST_DEVICE int32_t* row_state() const { return tables[kTableRowState].words; }
  PHOTON_HOST_DEVICE RowWords token_counts() const {
    if (num_tables <= kTableTokenCounts) return {nullptr, 0};
    return {tables[kTableTokenCounts].words, tables[kTableTokenCounts].size / rows};
  }
  PHOTON_HOST_DEVICE RowWords seen_bits() const {
    if (num_tables <= kTableSeenBits) return {nullptr, 0};
    return {tables[kTableSeenBits].words, tables[kTableSeenBits].size / rows};
  }
};

struct CarryOverIdsParams {
  int32_t* next;        // [n]
  const int32_t* prev;  // [num_prev]
  const int32_t* idx;   // [n]; < 0 keeps next[i]
  int64_t n, num_prev;
};

struct DecodeMetaSetParams {
  int32_t* decode_meta;      // [n, 4]
  const int32_t* tokens;     // [n]
  const int32_t* positions;  // [n]; < 0 makes the token dead
  const int32_t* rows;       // [n] or null: row i is i
  int64_t n;
};

struct PublishParams {
  int32_t* row_state;         // [rows, kRowColumns]
  int32_t* out_record;        // [num_segments, record_width]
  const int32_t* sampled;     // [num_segments]
  const int32_t* segments;    // [num_segments, 4]
  const int32_t* row_errors;  // [num_segments] or null
  RowWords stop_ids, token_counts, seen_bits;
  AutomataWords automata;
  int64_t rows, num_segments, record_width;
};

// --- sampling ------------------------------------------------------------------------------------

struct ApplyTokenMaskParams {
  void* logits;  // [num_segments, vocab]; disallowed entries become -inf
  const int32_t*
      mask;  // [num_masks, mask_words]; bit (id & 31) of word (id >> 5) set: id is allowed
  const int32_t* mask_keys;  // [num_segments, 3]
  const int32_t* segments;   // [num_segments, 4]
  const int32_t* row_state;  // [rows, kRowColumns]
  int32_t* row_errors;       // [num_segments]; written for every segment
  int64_t rows, num_segments, vocab, num_masks, mask_words, logits_stride;
  DType dtype;
};

struct SampleParams {
  int32_t* out;              // [num_segments]; -1: nothing sampled
  void* logits;              // [num_segments, vocab]; suppressed stop ids become -inf, and what the
                             // row's automaton forbids
  const int32_t* segments;   // [num_segments, 4]
  const int32_t* row_state;  // [rows, kRowColumns]
  int32_t*
      row_errors;  // [num_segments] or null; kRecordNoCandidate is added where no logit is finite
  RowWords stop_ids, biases, token_counts, seen_bits;
  AutomataWords automata;
  int32_t* logprobs;  // [num_segments, logprobs_width] or null
  int64_t logprobs_width;
  int64_t rows, num_segments, vocab, logits_stride;
  bool hopper;
  DType dtype;
};

// --- the forward ---------------------------------------------------------------------------------

struct SelectTokensParams {
  void* out;      // [num_segments, hidden]; out[r] = x[last token of segment r]; zeros for an empty
                  // segment
  const void* x;  // [num_tokens, hidden]
  const int32_t* segments;  // [num_segments, 4]
  int64_t num_segments, num_tokens, hidden, out_stride, x_stride;
  DType dtype;
};

struct RmsNormParams {
  void* out;           // [tokens, hidden]
  void* residual;      // add_rms_norm: [tokens, hidden], residual += x in its dtype, and the sum is
                       // normalized; null for rms_norm
  const void* x;       // [tokens, hidden]
  const void* weight;  // [hidden]
  int64_t tokens, hidden, out_stride, residual_stride, x_stride;
  float eps;
  DType dtype;
  const int32_t* counts = nullptr;  // [1] or null: only the first *counts tokens are computed
};

struct SiluMulParams {
  void* out;            // [tokens, width] = silu(gate_up[:, :width]) * gate_up[:, width:]
  const void* gate_up;  // [tokens, 2 * width]
  int64_t tokens, width, out_stride, gate_up_stride;
  DType dtype;
};

// KV memory: key/value element (page, token in page, head, d) is at page * page_stride + token *
// token_stride + head * head_stride + d. A contiguous [B, H, L, D] cache is one page per row:
// page_stride = H*L*D, token_stride = D, head_stride = L*D, page_size = L.
struct KvCache {
  void* k;
  void* v;
  const int32_t*
      page_table;  // [rows, pages_per_row], or null: a row's only page is the row's index
  int64_t num_pages, page_size, rows, pages_per_row;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  // null: keys and values are of the op's dtype. Else they are e4m3 bytes, and a number is its byte
  // times the scale of its token, head, and k or v (e4m3.h)
  float* scales;        // [num_pages, 2, scale_heads, page_size]: of keys, then of values
  int64_t scale_heads;  // KV heads
};

struct RopeParams {
  const float* cos;    // [max_len, head_dim], base pointer; kernels add position * head_dim. Both
                       // halves repeat the same angles
  const float* sin;    // [max_len, head_dim]
  const void* q_norm;  // [head_dim] or null: RMS norm of each head before the rotation (Qwen3)
  const void* k_norm;  // [head_dim] or null
  int64_t max_len;
  float eps;
};

struct RopeAppendKvParams {
  void* q;                     // [tokens, q_heads, head_dim], rotated in place
  const void* k;               // [tokens, kv_heads, head_dim]
  const void* v;               // [tokens, kv_heads, head_dim]
  const int32_t* decode_meta;  // [tokens, 4]
  const int32_t* counts;       // [1] or null: tokens below the first count are left as they are
  KvCache cache;
  RopeParams rope;
  int64_t tokens, q_heads, kv_heads, head_dim;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
  DType dtype;
};

struct PagedAttentionParams {
  void* out;      // [tokens, q_heads, head_dim]; zeros for dead tokens
  const void* q;  // [tokens, q_heads, head_dim]
  const int32_t*
      decode_meta;          // [tokens, 4]: a token attends to positions 0 .. length - 1 of its row
  const int32_t* segments;  // [num_segments, 4]: for the Hopper path: where its tiles of tokens
                            // start
  const int32_t* counts;    // [1] or null: tokens below the first count are left as they are
  float* workspace;  // [workspace_words] (chunk_workspace_words) or null, zeroed once by its owner:
                     // with `hopper`, balanced_attention where it fits
  int32_t* plan;     // (chunk_plan_words) or null: there is one where there is a workspace
  KvCache cache;
  int64_t tokens, num_segments, q_heads, kv_heads, head_dim, workspace_words;
  int64_t q_stride, q_head_stride, out_stride, out_head_stride;
  float scale;
  bool hopper;  // chunk_attention where it fits, which sums in another order
  bool pdl;     // balanced_attention may start while the kernels before it still run
  bool exact;   // balanced_attention cuts contexts by position alone
  DType dtype;
};

// One token per row. Rotates q and k, appends k and v to the cache, attends. q is left as it is.
struct FusedAttentionDecodeParams {
  void* out;                   // [tokens, q_heads, head_dim]; zeros for dead tokens
  const void* q;               // [tokens, q_heads, head_dim]
  const void* k;               // [tokens, kv_heads, head_dim]
  const void* v;               // [tokens, kv_heads, head_dim]
  const int32_t* decode_meta;  // [tokens, 4]
  const int32_t* counts;       // [1] or null: tokens from the first count on are left as they are
  float* workspace;  // [workspace_words] (common/kv_split.h) or null: the Hopper kernel's, zeroed
                     // once by its owner
  KvCache cache;
  RopeParams rope;
  int64_t tokens, q_heads, kv_heads, head_dim, workspace_words;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, out_stride,
      out_head_stride;
  float scale;
  bool hopper;  // the split kernel may run, which sums in another order; then there is a workspace
  bool pdl;     // it may start while those before it still run, and read all but q, k and v
  bool batch;   // with hopper: many tokens may be summed in an order that depends on the batch
  DType dtype;
};

constexpr int64_t kMaxHeadDim = 256;

}  // namespace photon
