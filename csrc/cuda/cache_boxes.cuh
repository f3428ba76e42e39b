// A KV cache as tensor copies see it: boxes of some tokens of one page by 64 columns of one head,
// each brought into shared memory by one instruction, in the layout of half_tile_map.cuh.
//
// A map has three dimensions: the columns of a head, the tokens of a page, and blocks. A block is
// one head of one page. Blocks are a head's stride apart, so that the next page is some blocks
// away, whether a page has its heads inside of its tokens or its tokens inside of its heads. What
// lies outside arrives as zeros: tokens behind the page, columns behind the head, and blocks below
// 0.
#pragma once
#include <climits>

#include "common/params.h"
#include "cuda/half_tile_map.cuh"
#include "cuda/launch.cuh"

namespace photon::cuda {

// A kernel parameter, __grid_constant__.
struct CacheBoxes {
  static constexpr int kMostTokens = 64;

  CUtensorMap maps[2];  // of keys and of values
  int tokens;           // of a box; 0: this cache has no boxes
  int token_shift;      // log2 of that
  int page_shift;       // log2 of the page size; 31 where a row has only one page
  int page_blocks;      // blocks from a page to the next

  __device__ bool are_there() const { return tokens != 0; }

  // Page -1, which is no page, has blocks below 0.
  __device__ int block(int page, int head) const { return page * page_blocks + head; }
};

// The strides of keys or of values, in elements, in which heads of pages are blocks.
struct BlockStrides {
  int64_t token, block, page_blocks;

  // With page_blocks 0 where pages are no whole number of blocks apart.
  BlockStrides(int64_t heads, int64_t page_stride, int64_t token_stride, int64_t head_stride)
      : token(token_stride), block(heads == 1 ? page_stride : head_stride) {
    page_blocks = block > 0 && page_stride % block == 0 ? page_stride / block : 0;
  }
};

inline int make_box_map(CUtensorMap& map, const void* tensor, const KvCache& cache,
                        const BlockStrides& strides, int64_t heads, int64_t head_dim, int tokens) {
  const int64_t blocks = (cache.num_pages - 1) * strides.page_blocks + heads;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(cache.page_size),
                              static_cast<cuuint64_t>(blocks)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(strides.token) * 2,
                              static_cast<cuuint64_t>(strides.block) * 2};
  const cuuint32_t box[] = {kSliceColumns, static_cast<cuuint32_t>(tokens), 1};
  return encode_swizzled_map(map, tensor, sizes, bytes, box);
}

inline int log2_of(int64_t power) {
  int shift = 0;
  while (int64_t{1} << shift < power) ++shift;
  return shift;
}

// The boxes of a cache of bfloat16 whose addresses and strides are of whole 16-byte vectors. It has
// none where the device has no tensor copies, where the pages of a row have fewer than 8 tokens or
// no power of two, or where the strides make no blocks, the same for keys and values.
inline CacheBoxes make_cache_boxes(const KvCache& c, int64_t heads, int64_t head_dim) {
  CacheBoxes boxes = {};
  const bool is_one_page = c.page_table == nullptr || c.pages_per_row == 1;
  const bool divides =
      is_one_page || (c.page_size >= kHalfTileRows && (c.page_size & (c.page_size - 1)) == 0);
  const BlockStrides k(heads, c.k_page_stride, c.k_token_stride, c.k_head_stride),
      v(heads, c.v_page_stride, c.v_token_stride, c.v_head_stride);
  const bool has_blocks = k.page_blocks == v.page_blocks && k.page_blocks >= heads &&
                          k.page_blocks <= INT_MAX / c.num_pages;
  if (!divides || !has_blocks || !hopper_runs()) return boxes;
  const int tokens = is_one_page || c.page_size > CacheBoxes::kMostTokens
                         ? CacheBoxes::kMostTokens
                         : static_cast<int>(c.page_size);
  if (make_box_map(boxes.maps[0], c.k, c, k, heads, head_dim, tokens) != cudaSuccess ||
      make_box_map(boxes.maps[1], c.v, c, v, heads, head_dim, tokens) != cudaSuccess)
    return boxes;
  boxes.tokens = tokens;
  boxes.token_shift = log2_of(tokens);
  boxes.page_shift = is_one_page ? 31 : log2_of(c.page_size);
  boxes.page_blocks = static_cast<int>(k.page_blocks);
  return boxes;
}

}  // namespace photon::cuda
