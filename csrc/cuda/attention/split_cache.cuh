// KV memory as split attention indexes it: vectors of 16 bytes, counted in 32 bits, and divisions
// that the host prepared.
#pragma once
#include <algorithm>

#include "common/kv.h"
#include "cuda/bf16.cuh"
#include "cuda/divisor.cuh"
#include "cuda/element.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

constexpr uint32_t kAbsent = UINT32_MAX;  // no position of the context, or not in the cache

// Where the key and the value of one position of a KV head are, in vectors from the cache's bases.
struct KvPlaces {
  uint32_t k, v;
};

struct SplitCache {
  Bf16 *k, *v;
  const int32_t* page_table;  // null: a row's only page is the row's index
  int32_t rows, num_pages, pages_per_row;
  int32_t capacity;  // positions of a row
  Divisor page_size;
  uint32_t k_page, k_token, k_head, v_page, v_token, v_head;

  explicit SplitCache(const KvCache& c)
      : k(static_cast<Bf16*>(c.k)),
        v(static_cast<Bf16*>(c.v)),
        page_table(c.page_table),
        rows(clamped(c.page_table != nullptr ? c.rows : c.num_pages)),
        num_pages(clamped(c.num_pages)),
        pages_per_row(clamped(c.pages_per_row)),
        capacity(clamped(row_capacity(c))),
        page_size(std::max<int64_t>(c.page_size, 1)),
        k_page(vectors(c.k_page_stride)),
        k_token(vectors(c.k_token_stride)),
        k_head(vectors(c.k_head_stride)),
        v_page(vectors(c.v_page_stride)),
        v_token(vectors(c.v_token_stride)),
        v_head(vectors(c.v_head_stride)) {}

  // As kv_len() in common/kv.h.
  __device__ int32_t kv_len(const Token& token) const {
    return token.length > 0 && token.row >= 0 && token.row < rows ? min(token.length, capacity) : 0;
  }

  // Where the pages of a row that is in the tables are listed; null: the row is its only page.
  __device__ const int32_t* pages_of(int32_t row) const {
    return page_table != nullptr ? page_table + static_cast<int64_t>(row) * pages_per_row : nullptr;
  }

  // Requests the page of a position of a row with these pages, if it is `wanted`; its places are
  // another matter, so that nothing waits here.
  __device__ int32_t request(const int32_t* pages, int32_t row, int32_t position,
                             bool wanted) const {
    wanted = wanted && static_cast<uint32_t>(position) < static_cast<uint32_t>(capacity);
    int32_t page = wanted ? row : -1;
    if (wanted && pages != nullptr) page = pages[page_size.divides(position)];
    return page;
  }

  __device__ KvPlaces places(int32_t page, int32_t head, int32_t position) const {
    const uint32_t token = position - page_size.divides(position) * page_size.of;
    const KvPlaces places = {page * k_page + token * k_token + head * k_head,
                             page * v_page + token * v_token + head * v_head};
    const bool is_there = static_cast<uint32_t>(page) < static_cast<uint32_t>(num_pages);
    return {is_there ? places.k : kAbsent, is_there ? places.v : kAbsent};
  }

 private:
  static int32_t clamped(int64_t n) {
    return static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX));
  }
  static uint32_t vectors(int64_t stride) { return static_cast<uint32_t>(stride / kPack); }
};

}  // namespace photon::cuda
