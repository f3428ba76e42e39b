// Where a token and its context live in KV memory, with every index checked.
#pragma once
#include <climits>
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "token.h"

namespace photon {

// The token is alive and its position has angles in the tables.
PHOTON_HOST_DEVICE inline bool can_rotate(const RopeParams& rope, const Token& token) {
  return token.length > 0 && token.position >= 0 && token.position < rope.max_len;
}

// Positions of a row at most.
PHOTON_HOST_DEVICE inline int64_t row_capacity(const KvCache& cache) {
  return cache.page_table != nullptr ? cache.pages_per_row * cache.page_size : cache.page_size;
}

// How much of a token's context its row can hold: its length, or 0 if it is dead or its row is
// outside the tables.
PHOTON_HOST_DEVICE inline int32_t kv_len(const KvCache& cache, const Token& token) {
  const int64_t rows = cache.page_table != nullptr ? cache.rows : cache.num_pages;
  if (token.length <= 0 || token.row < 0 || token.row >= rows) return 0;
  const int64_t capacity = row_capacity(cache);
  return token.length < capacity ? token.length : static_cast<int32_t>(capacity);
}

// Bytes of an element of keys and values.
PHOTON_HOST_DEVICE inline int64_t kv_element_size(const KvCache& cache, DType dtype) {
  return cache.scales != nullptr ? 1 : size_of(dtype);
}

struct KvPlace {
  int32_t page, token;  // page < 0: there is no such place

  PHOTON_HOST_DEVICE int64_t k_offset(const KvCache& c, int64_t head) const {
    return page * c.k_page_stride + token * c.k_token_stride + head * c.k_head_stride;
  }
  PHOTON_HOST_DEVICE int64_t v_offset(const KvCache& c, int64_t head) const {
    return page * c.v_page_stride + token * c.v_token_stride + head * c.v_head_stride;
  }
  PHOTON_HOST_DEVICE int64_t k_scale_offset(const KvCache& c, int64_t head) const {
    return (2 * c.scale_heads * page + head) * c.page_size + token;
  }
  PHOTON_HOST_DEVICE int64_t v_scale_offset(const KvCache& c, int64_t head) const {
    return k_scale_offset(c, c.scale_heads + head);
  }
};

// The place of one position of a row that is in the tables. 32-bit division, because a GPU's wide
// one is slow; no position is beyond it.
PHOTON_HOST_DEVICE inline KvPlace find_place(const KvCache& cache, int32_t row, int32_t position) {
  const int32_t page_size =
      cache.page_size < INT32_MAX ? static_cast<int32_t>(cache.page_size) : INT32_MAX;
  if (position < 0) return {-1, 0};
  const int32_t slot = position / page_size;
  if (cache.page_table == nullptr) return {slot == 0 ? row : -1, position};
  if (slot >= cache.pages_per_row) return {-1, 0};
  const int32_t page = cache.page_table[row * cache.pages_per_row + slot];
  return {page >= 0 && page < cache.num_pages ? page : -1, position - slot * page_size};
}

// Where a token's own key and value go.
PHOTON_HOST_DEVICE inline KvPlace own_place(const KvCache& cache, const Token& token) {
  if (kv_len(cache, token) == 0) return {-1, 0};
  return find_place(cache, token.row, token.position);
}

// How much of its row a decode token attends to, its own position included; 0: it is dead, or has
// no angles or no place in the cache.
PHOTON_HOST_DEVICE inline int32_t decode_length(const KvCache& cache, const RopeParams& rope,
                                                const Token& token) {
  return can_rotate(rope, token) && own_place(cache, token).page >= 0 ? kv_len(cache, token) : 0;
}

}  // namespace photon
