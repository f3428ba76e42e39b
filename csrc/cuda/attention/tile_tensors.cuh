// Keys and values of a cache as tensor copies see them.
#pragma once
#include "common/kv.h"
#include "cuda/row_tile_map.cuh"

namespace photon::cuda {

constexpr int kRunTokens = 16;  // positions that one copy brings

// Keys or values of the cache as a tensor of rows of a token's stride: where pages and heads begin.
struct TileTensor {
  int page_rows, head_rows, head_slices;
  int rows;  // of all pages

  TileTensor(int64_t page, int64_t token, int64_t head, int64_t pages)
      : page_rows(static_cast<int>(page / token)),
        head_rows(static_cast<int>(head / token)),
        head_slices(static_cast<int>(head % token / kKBlockColumns)),
        rows(static_cast<int>(page / token * pages)) {}

  __device__ int row(int32_t page, int32_t head, int32_t token) const {
    return page * page_rows + head * head_rows + token;
  }
  // Behind all rows where there is no such place: a copy brings zeros from there.
  __device__ int row(const KvPlace& place, int32_t head) const {
    return place.page >= 0 ? row(place.page, head, place.token) : rows;
  }
};

// Both, a kernel parameter. A tile is kRunTokens positions of a page, from a multiple of them on.
struct TileTensors {
  RowTileMap k_map = {}, v_map = {};
  TileTensor k, v;

  explicit TileTensors(const KvCache& c)
      : k(c.k_page_stride, c.k_token_stride, c.k_head_stride, c.num_pages),
        v(c.v_page_stride, c.v_token_stride, c.v_head_stride, c.num_pages) {}

  // Returns the CUDA error. A copy brings `slices` slices of a tile. A map's rows are all positions
  // of all heads, or of the first one alone where rows have the heads side by side.
  int make_maps(const KvCache& c, int slices) {
    const auto make = [&](RowTileMap& map, const void* base, const TileTensor& tensor,
                          int64_t token_stride) {
      return make_row_tile_map(map, slices, base, tensor.rows, token_stride, token_stride,
                               kRunTokens);
    };
    const int error = make(k_map, c.k, k, c.k_token_stride);
    return error != 0 ? error : make(v_map, c.v, v, c.v_token_stride);
  }
};

}  // namespace photon::cuda
