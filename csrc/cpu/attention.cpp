// rope_append_kv, paged_attention and fused_attention_decode: where each token's queries, keys and
// values are; the arithmetic is in simd/attention.cpp. Tasks are (token, KV head): the query heads
// of a group share one read of its keys and values.
#include <algorithm>
#include <cstring>

#include "common/e4m3.h"
#include "common/kv.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kRotateGrainElements = 4 * 1024;
constexpr int64_t kAttendGrainElements =
    64 * 1024;  // query elements times positions: a microsecond or two

char* offset(void* base, int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * size_of(dtype);
}
char* kv_offset(void* base, int64_t elements, const KvCache& cache, DType dtype) {
  return static_cast<char*>(base) + elements * kv_element_size(cache, dtype);
}
const char* offset(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * size_of(dtype);
}

// The context of a token whose row is in the tables.
KvContext kv_context(const KvCache& cache, const int32_t* meta, int64_t head, DType dtype) {
  const bool paged = cache.page_table != nullptr, scaled = cache.scales != nullptr;
  constexpr KvPlace kFirst = {0, 0};
  return {kv_offset(cache.k, head * cache.k_head_stride, cache, dtype),
          kv_offset(cache.v, head * cache.v_head_stride, cache, dtype),
          paged ? cache.page_table + meta[kMetaRow] * cache.pages_per_row : meta + kMetaRow,
          paged ? cache.pages_per_row : 1,
          cache.num_pages,
          cache.page_size,
          cache.k_page_stride,
          cache.k_token_stride,
          cache.v_page_stride,
          cache.v_token_stride,
          scaled ? cache.scales + kFirst.k_scale_offset(cache, head) : nullptr,
          scaled ? cache.scales + kFirst.v_scale_offset(cache, head) : nullptr,
          2 * cache.scale_heads * cache.page_size};
}

void rotate(void* out, const void* in, const void* norm, const RopeParams& rope, const Token& token,
            int64_t head_dim, DType dtype) {
  const int64_t at = token.position * head_dim;
  simd().rotate({out, in, norm, rope.cos + at, rope.sin + at, head_dim, rope.eps, dtype});
}

void zero_heads(void* out, int64_t heads, int64_t head_dim, int64_t head_stride, DType dtype) {
  for (int64_t h = 0; h < heads; ++h) {
    std::memset(offset(out, h * head_stride, dtype), 0,
                static_cast<size_t>(head_dim * size_of(dtype)));
  }
}

// A head as e4m3 bytes.
void store_fp8(void* out, float* scale, const void* head, int64_t head_dim, DType dtype) {
  float numbers[kMaxHeadDim];
  simd().to_float(numbers, head, head_dim, dtype);
  *scale = quantize_e4m3(static_cast<uint8_t*>(out), numbers, head_dim);
}

// Rotates one key head into its place in the cache, and copies the value head; false where it has
// no place.
bool append_kv(const KvCache& cache, const RopeParams& rope, const Token& token, int64_t head,
               const void* k, const void* v, int64_t head_dim, DType dtype) {
  const KvPlace place = own_place(cache, token);
  if (place.page < 0) return false;
  void* const key = kv_offset(cache.k, place.k_offset(cache, head), cache, dtype);
  void* const value = kv_offset(cache.v, place.v_offset(cache, head), cache, dtype);
  if (cache.scales != nullptr) {
    float rotated[kMaxHeadDim];  // of dtype
    rotate(rotated, k, rope.k_norm, rope, token, head_dim, dtype);
    store_fp8(key, cache.scales + place.k_scale_offset(cache, head), rotated, head_dim, dtype);
    store_fp8(value, cache.scales + place.v_scale_offset(cache, head), v, head_dim, dtype);
    return true;
  }
  rotate(key, k, rope.k_norm, rope, token, head_dim, dtype);
  std::memcpy(value, v, static_cast<size_t>(head_dim * size_of(dtype)));
  return true;
}

void rope_append_token(const RopeAppendKvParams& p, int64_t index) {
  const Token token = load_token(p.decode_meta, index);
  if (!is_chunk_token(p.counts, index) || !can_rotate(p.rope, token)) return;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    void* q = offset(p.q, index * p.q_stride + h * p.q_head_stride, p.dtype);
    rotate(q, q, p.rope.q_norm, p.rope, token, p.head_dim, p.dtype);
  }
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    append_kv(p.cache, p.rope, token, h,
              offset(p.k, index * p.k_stride + h * p.k_head_stride, p.dtype),
              offset(p.v, index * p.v_stride + h * p.v_head_stride, p.dtype), p.head_dim, p.dtype);
  }
}

void attend_group(const PagedAttentionParams& p, int64_t index, int64_t kv_head) {
  if (!is_chunk_token(p.counts, index)) return;
  const int64_t heads = p.q_heads / p.kv_heads, first = kv_head * heads,
                length = kv_len(p.cache, load_token(p.decode_meta, index));
  void* out = offset(p.out, index * p.out_stride + first * p.out_head_stride, p.dtype);
  if (length == 0) {
    zero_heads(out, heads, p.head_dim, p.out_head_stride, p.dtype);
    return;
  }
  const void* q = offset(p.q, index * p.q_stride + first * p.q_head_stride, p.dtype);
  const KvContext context =
      kv_context(p.cache, p.decode_meta + index * kMetaColumns, kv_head, p.dtype);
  simd().attend({out, q, context, heads, p.head_dim, length, p.q_head_stride, p.out_head_stride,
                 p.scale, p.dtype});
}

void fused_group(const FusedAttentionDecodeParams& p, int64_t index, int64_t kv_head) {
  constexpr int64_t kHeadsAtOnce = 4;  // rotated queries in hand
  if (!is_decode_token(p.counts, index)) return;
  const Token token = load_token(p.decode_meta, index);
  const int64_t heads = p.q_heads / p.kv_heads, first = kv_head * heads;
  void* out = offset(p.out, index * p.out_stride + first * p.out_head_stride, p.dtype);
  if (!can_rotate(p.rope, token) ||
      !append_kv(p.cache, p.rope, token, kv_head,
                 offset(p.k, index * p.k_stride + kv_head * p.k_head_stride, p.dtype),
                 offset(p.v, index * p.v_stride + kv_head * p.v_head_stride, p.dtype), p.head_dim,
                 p.dtype)) {
    zero_heads(out, heads, p.head_dim, p.out_head_stride, p.dtype);
    return;
  }
  const KvContext context =
      kv_context(p.cache, p.decode_meta + index * kMetaColumns, kv_head, p.dtype);
  float rotated[kHeadsAtOnce * kMaxHeadDim];  // of dtype; as floats there is room enough
  for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
    const int64_t count = heads - h < kHeadsAtOnce ? heads - h : kHeadsAtOnce;
    for (int64_t i = 0; i < count; ++i) {
      const void* q = offset(p.q, index * p.q_stride + (first + h + i) * p.q_head_stride, p.dtype);
      rotate(offset(rotated, i * kMaxHeadDim, p.dtype), q, p.rope.q_norm, p.rope, token, p.head_dim,
             p.dtype);
    }
    simd().attend({offset(out, h * p.out_head_stride, p.dtype), rotated, context, count, p.head_dim,
                   kv_len(p.cache, token), kMaxHeadDim, p.out_head_stride, p.scale, p.dtype});
  }
}

// Calls body(token, KV head) for all of them; short contexts are not worth handing to another
// thread one by one.
template <typename Params, typename Body>
void for_groups(const Params& p, const Body& body) {
  int64_t positions = 0;
  for (int64_t token = 0; token < p.tokens; ++token)
    positions += std::max(p.decode_meta[token * kMetaColumns + kMetaLength], 0);
  const int64_t kv_heads = p.kv_heads, tasks = p.tokens * kv_heads;
  const int64_t elements = positions * p.q_heads * p.head_dim;
  parallel_for(tasks, 1 + tasks * kAttendGrainElements / (elements + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t task = begin; task < end; ++task)
                   body(task / kv_heads, task % kv_heads);
               });
}

}  // namespace

void rope_append_kv(const RopeAppendKvParams& p) {
  const int64_t elements = (p.q_heads + 2 * p.kv_heads) * p.head_dim;
  parallel_for(p.tokens, 1 + kRotateGrainElements / (elements + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t token = begin; token < end; ++token) rope_append_token(p, token);
               });
}

// Nothing here reads a plan.
void chunk_plan(const PagedAttentionParams&) {}

void paged_attention(const PagedAttentionParams& p) {
  for_groups(p, [&](int64_t token, int64_t kv_head) { attend_group(p, token, kv_head); });
}

void fused_attention_decode(const FusedAttentionDecodeParams& p) {
  for_groups(p, [&](int64_t token, int64_t kv_head) { fused_group(p, token, kv_head); });
}

}  // namespace photon::cpu
