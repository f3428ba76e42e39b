// What a launch of split attention has worked out for its CTAs, and the order of its tokens.
#pragma once
#include <algorithm>

#include "common/gpu.h"
#include "common/kv.h"
#include "cuda/bf16.cuh"
#include "cuda/divisor.cuh"
#include "cuda/element.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {

// KV memory as split attention indexes it: vectors of 16 bytes, counted in 32 bits, and divisions
// that the host prepared.

constexpr uint32_t kAbsent = UINT32_MAX;  // no position of the context, or not in the cache

// Where the key and the value of one position of a KV head are, in vectors from the cache's bases.
struct KvPlaces {
  uint32_t k, v;
};

struct SplitCache {
  Bf16 *k, *v;                // fp8: what they point to is bytes
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
        k_page(vectors(c, c.k_page_stride)),
        k_token(vectors(c, c.k_token_stride)),
        k_head(vectors(c, c.k_head_stride)),
        v_page(vectors(c, c.v_page_stride)),
        v_token(vectors(c, c.v_token_stride)),
        v_head(vectors(c, c.v_head_stride)) {}

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

  // Where in its page a position is.
  __device__ uint32_t token_of(int32_t position) const {
    return position - page_size.divides(position) * page_size.of;
  }

  __device__ KvPlaces places(int32_t page, int32_t head, int32_t position) const {
    const uint32_t token = token_of(position);
    const KvPlaces places = {page * k_page + token * k_token + head * k_head,
                             page * v_page + token * v_token + head * v_head};
    const bool is_there = static_cast<uint32_t>(page) < static_cast<uint32_t>(num_pages);
    return {is_there ? places.k : kAbsent, is_there ? places.v : kAbsent};
  }

 private:
  static int32_t clamped(int64_t n) {
    return static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX));
  }
  static uint32_t vectors(const KvCache& c, int64_t stride) {
    return static_cast<uint32_t>(stride * kv_element_size(c, DType::kBF16) / kVectorBytes);
  }
};

// Vectors of tokens and heads, in the strides of a tensor.
template <typename T>
struct TokenHeads {
  T* base;
  int token_stride, head_stride;

  TokenHeads(T* base, int64_t token_stride, int64_t head_stride)
      : base(base),
        token_stride(static_cast<int>(token_stride)),
        head_stride(static_cast<int>(head_stride)) {}

  __device__ T* at(int token, int head) const {
    return base + static_cast<int64_t>(token) * token_stride +
           static_cast<int64_t>(head) * head_stride;
  }
};

// What the host has worked out, in 32 bits. A split-KV group: the tile ranges of a tile of query
// heads of a token.
struct SplitGrid {
  const int32_t* decode_meta;
  int tokens, q_heads, group;  // group: query heads of a KV head
  Divisor token_split_groups;  // split-KV groups of a token
  Divisor tiles;               // split-KV groups of a KV head
  Divisor splits;              // of a long context
  Divisor blocks;              // of the launch
  Divisor rank_pieces;  // of a query's sums, that a rank merges at most (split_reduction.cuh)
  int rank_bits;        // log2 of a cluster's CTAs
  int item_bits;        // log2 of a work item's positions
  unsigned slack;       // work items more than in an even division that a CTA may take with whole
                        // split-KV groups, which saves a reduction
  SplitCache cache;
  TokenHeads<const Bf16> q, k, v;
  TokenHeads<Bf16> out;

  using Places = KvPlaces;
  __device__ KvPlaces places(int32_t page, int32_t kv_head, int32_t position) const {
    return cache.places(page, kv_head, position);
  }

  __device__ int ranks() const { return 1 << rank_bits; }
  // The most of `things` that one rank gets.
  __device__ int each_rank(int things) const { return (things + ranks() - 1) >> rank_bits; }

  __device__ unsigned items_of(int32_t length) const {
    return (static_cast<unsigned>(length) + (1u << item_bits) - 1) >> item_bits;
  }

  // Positions that a token attends to, if it is live.
  __device__ int32_t kv_len(int token) const {
    return cache.kv_len(load_token(decode_meta, token));
  }
};

// The scales of keys and values in fp8, counted in 32 bits.
struct KvScales {
  float* base;
  uint32_t page, head, values;  // strides: of pages, of KV heads, and from a key's to its value's

  explicit KvScales(const KvCache& c)
      : base(c.scales),
        page(static_cast<uint32_t>(2 * c.scale_heads * c.page_size)),
        head(static_cast<uint32_t>(c.page_size)),
        values(static_cast<uint32_t>(c.scale_heads * c.page_size)) {}
};

// Of keys and values in fp8.
struct ScaledGrid : SplitGrid {
  KvScales scales;

  struct Places : KvPlaces {
    uint32_t scale;  // of the key
  };
  __device__ Places places(int32_t page, int32_t kv_head, int32_t position) const {
    return {cache.places(page, kv_head, position),
            page * scales.page + kv_head * scales.head + cache.token_of(position)};
  }
};

// The tokens of a launch of split attention by the length of their contexts, longest first.

// In shared memory. Tokens with as many work items are of one class, those with kClasses or more,
// too, and stand in the order of their indices, so that all CTAs have the same order. Dead tokens
// have no place.
struct TokenOrder {
  // As many tokens as 1 KiB holds (ReductionMemory). The last class has one work item.
  static constexpr int kTokens = 448, kClasses = kWarpSize;

  unsigned places[kClasses];  // while sorting: tokens of a class, then where the next one goes
  uint16_t tokens[kTokens];

  // One warp calls it, and a barrier of the CTA follows. Of grid.tokens up to kTokens.
  __device__ void sort(const SplitGrid& grid) {
    const int lane = threadIdx.x % kWarpSize;
    places[lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < grid.tokens; i += kWarpSize) {
      const int32_t length = grid.kv_len(i);
      if (length > 0) atomicAdd(&places[class_of(grid, length)], 1u);
    }
    __syncwarp();
    const unsigned count = places[lane];
    places[lane] = warp_sum_upto(count) - count;
    __syncwarp();
#pragma unroll 1
    for (int from = 0; from < grid.tokens; from += kWarpSize)
      place(grid, from + lane, from + lane < grid.tokens ? grid.kv_len(from + lane) : 0);
  }

 private:
  __device__ static int class_of(const SplitGrid& grid, int32_t length) {
    return kClasses - min(static_cast<int>(grid.items_of(length)), kClasses);
  }

  // Each lane has a token; length 0: none.
  __device__ void place(const SplitGrid& grid, int token, int32_t length) {
    const int lane = threadIdx.x % kWarpSize, own = class_of(grid, max(length, 1));
    unsigned peers = __ballot_sync(kFullWarp, length > 0);  // of the lane's class
#pragma unroll
    for (int bit = 1; bit < kClasses; bit *= 2) {
      const unsigned set = __ballot_sync(kFullWarp, (own & bit) != 0);
      peers &= (own & bit) != 0 ? set : ~set;
    }
    const unsigned first = places[own], before = __popc(peers & ((1u << lane) - 1));
    if (length > 0) tokens[first + before] = static_cast<uint16_t>(token);
    __syncwarp();
    if (peers >> lane == 1) places[own] = first + before + 1;
    __syncwarp();
  }
};

}  // namespace photon::cuda
