// A KV cache as tensor copies see it: boxes of some tokens of one page by 64 columns of one head,
// each brought into shared memory by one instruction, in the layout of half_tile_map.cuh.
//
// A map has three dimensions: the columns of a head, the tokens of a page, and blocks. A block is
// one head of one page. Blocks are a head's stride apart, so that the next page is some blocks
// away, whether a page has its heads inside of its tokens or its tokens inside of its heads. What
// lies outside arrives as zeros: tokens behind the page, columns behind the head, and the block -1.
#pragma once
#include <climits>

#include "common/params.h"
#include "cuda/half_tile_map.cuh"
#include "cuda/launch.cuh"

namespace photon::cuda {

struct BoxMap {
  CUtensorMap map;
  int page_blocks;  // blocks from a page to the next
};

// A kernel parameter, __grid_constant__.
struct CacheBoxes {
  static constexpr int kMostTokens = 64;

  BoxMap k, v;
  int tokens;       // of a box; 0: this cache has no boxes
  int token_shift;  // log2 of that
  int page_shift;   // log2 of the page size; 31 where a row has only one page

  __device__ bool are_there() const { return tokens != 0; }
};

// Strides are in elements. False where there is no such map.
inline bool make_box_map(BoxMap& boxes, const void* tensor, const KvCache& cache, int64_t heads,
                         int64_t head_dim, int box_tokens, int64_t page_stride,
                         int64_t token_stride, int64_t head_stride) {
  const int64_t block_stride = heads == 1 ? page_stride : head_stride;
  if (block_stride <= 0 || page_stride <= 0 || page_stride % block_stride != 0) return false;
  const int64_t page_blocks = page_stride / block_stride;
  if (page_blocks > INT_MAX / cache.num_pages) return false;
  boxes.page_blocks = static_cast<int>(page_blocks);
  const int64_t blocks = (cache.num_pages - 1) * page_blocks + heads;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(cache.page_size),
                              static_cast<cuuint64_t>(blocks)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(token_stride) * 2,
                                static_cast<cuuint64_t>(block_stride) * 2};  // bytes
  const cuuint32_t box[] = {kSliceColumns, static_cast<cuuint32_t>(box_tokens), 1};
  return encode_swizzled_map(boxes.map, tensor, sizes, strides, box) == cudaSuccess;
}

inline int log2_of(int64_t power) {
  int shift = 0;
  while (int64_t{1} << shift < power) ++shift;
  return shift;
}

// The boxes of a cache of bfloat16 whose addresses and strides are of whole 16-byte vectors. It has
// none where the device has no tensor copies, or where the pages of a row have fewer than 8 tokens
// or no power of two.
inline CacheBoxes make_cache_boxes(const KvCache& c, int64_t heads, int64_t head_dim) {
  CacheBoxes boxes = {};
  const bool is_one_page = c.page_table == nullptr || c.pages_per_row == 1;
  const bool has_boxes =
      is_one_page || (c.page_size >= kHalfTileRows && (c.page_size & (c.page_size - 1)) == 0);
  if (!has_boxes || !hopper_runs()) return boxes;
  const int tokens = is_one_page || c.page_size > CacheBoxes::kMostTokens
                         ? CacheBoxes::kMostTokens
                         : static_cast<int>(c.page_size);
  if (!make_box_map(boxes.k, c.k, c, heads, head_dim, tokens, c.k_page_stride, c.k_token_stride,
                    c.k_head_stride) ||
      !make_box_map(boxes.v, c.v, c, heads, head_dim, tokens, c.v_page_stride, c.v_token_stride,
                    c.v_head_stride))
    return boxes;
  boxes.tokens = tokens;
  boxes.token_shift = log2_of(tokens);
  boxes.page_shift = is_one_page ? 31 : log2_of(c.page_size);
  return boxes;
}

}  // namespace photon::cuda
