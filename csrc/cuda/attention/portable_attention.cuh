// The portable kernel of paged_attention and of fused_attention_decode, which is rope_append_kv and
// it in one kernel: of keys and values of the op's dtype (attention.cu), or in fp8
// (fp8_attention.cu).
#pragma once
#include "common/attention_plan.h"
#include "common/kv.h"
#include "cuda/attention/attend.cuh"
#include "cuda/attention/rotate.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"

namespace photon::cuda {

// Copies one head by one warp; what is past head_dim, up to `padded`, becomes zero.
template <typename T>
__device__ void copy_head(T* out, const T* in, int head_dim, int padded) {
  for (int d = threadIdx.x % kWarpSize; d < padded; d += kWarpSize)
    out[d] = d < head_dim ? in[d] : from_float<T>(0.0f);
}

// What one CTA of attention works on: some query heads of one token that share a KV head.
struct HeadTile {
  int64_t token, kv_head, first_q_head;
  int heads;
  bool is_first;  // of the tiles of this KV head
};

template <int kHeads, typename Params>
__device__ HeadTile head_tile(const Params& p, int64_t tiles) {
  const int64_t group = p.q_heads / p.kv_heads, tile = blockIdx.x % tiles,
                index = blockIdx.x / tiles;
  const int64_t token = index / p.kv_heads, kv_head = index % p.kv_heads,
                left = group - tile * kHeads;
  return {token, kv_head, kv_head * group + tile * kHeads,
          static_cast<int>(left < kHeads ? left : kHeads), tile == 0};
}

// Whether the token is the call's: of a mixed step it may be the other attention's.
__device__ inline bool has_token(const PagedAttentionParams& p, int64_t index) {
  return is_chunk_token(p.counts, index);
}

__device__ inline bool has_token(const FusedAttentionDecodeParams& p, int64_t index) {
  return is_decode_token(p.counts, index);
}

// The token with the length that is attended to; 0: the output is zeros.
__device__ inline Token attended_token(const PagedAttentionParams& p, int64_t index) {
  Token token = load_token(p.decode_meta, index);
  token.length = kv_len(p.cache, token);
  return token;
}

__device__ inline Token attended_token(const FusedAttentionDecodeParams& p, int64_t index) {
  Token token = load_token(p.decode_meta, index);
  token.length = decode_length(p.cache, p.rope, token);
  return token;
}

// Puts the tile's queries into shared memory, one warp per head, and returns the position whose k
// and v are there too: none.
template <typename T, typename Kv, int kLanes, int kHeads>
__device__ int32_t stage_token(const PagedAttentionParams& p, const HeadTile& tile, const Token&,
                               AttendShared<T, Kv, kLanes, kHeads>& shared) {
  constexpr int kDims = AttendShared<T, Kv, kLanes, kHeads>::kDims;
  const int warp = threadIdx.x / kWarpSize;
  if (warp < kHeads) {
    const T* q = static_cast<const T*>(p.q) + tile.token * p.q_stride +
                 (tile.first_q_head + warp) * p.q_head_stride;
    copy_head(shared.q[warp], q, warp < tile.heads ? static_cast<int>(p.head_dim) : 0, kDims);
  }
  return -1;
}

// The same with rotation; the new key and value go to shared memory, and the KV head's first tile
// appends them to the cache. No CTA reads them back from there.
template <typename T, typename Kv, int kLanes, int kHeads>
__device__ int32_t stage_token(const FusedAttentionDecodeParams& p, const HeadTile& tile,
                               const Token& token, AttendShared<T, Kv, kLanes, kHeads>& shared) {
  constexpr int kDims = AttendShared<T, Kv, kLanes, kHeads>::kDims;
  static_assert(kHeads + 2 <= kAttendWarps, "a warp per query head, one for k, one for v");
  const int warp = threadIdx.x / kWarpSize, head_dim = static_cast<int>(p.head_dim);
  const KvPlace place = find_place(p.cache, token.row, token.position);
  if (warp < kHeads) {
    const T* q = static_cast<const T*>(p.q) + tile.token * p.q_stride +
                 (tile.first_q_head + warp) * p.q_head_stride;
    copy_head(shared.q[warp], q, 0, kDims);
    __syncwarp();  // the zeros are written by other lanes than the values over them
    if (warp < tile.heads) {
      rotate_head(q, static_cast<const T*>(p.rope.q_norm), p.rope, token.position, head_dim)
          .store(shared.q[warp], head_dim);
    }
  } else if (warp == kHeads) {
    const T* k =
        static_cast<const T*>(p.k) + tile.token * p.k_stride + tile.kv_head * p.k_head_stride;
    const LanePairs<T> rotated =
        rotate_head(k, static_cast<const T*>(p.rope.k_norm), p.rope, token.position, head_dim);
    Kv* const cache = static_cast<Kv*>(p.cache.k) + place.k_offset(p.cache, tile.kv_head);
    float* const scale =
        kScaled<Kv> ? p.cache.scales + place.k_scale_offset(p.cache, tile.kv_head) : nullptr;
    stage_new(rotated, head_dim, shared.new_k, &shared.new_k_scale, tile.is_first ? cache : nullptr,
              scale);
  } else if (warp == kHeads + 1) {
    const T* v =
        static_cast<const T*>(p.v) + tile.token * p.v_stride + tile.kv_head * p.v_head_stride;
    Kv* const cache = static_cast<Kv*>(p.cache.v) + place.v_offset(p.cache, tile.kv_head);
    float* const scale =
        kScaled<Kv> ? p.cache.scales + place.v_scale_offset(p.cache, tile.kv_head) : nullptr;
    stage_new(LanePairs<T>::load(v, head_dim), head_dim, shared.new_v, &shared.new_v_scale,
              tile.is_first ? cache : nullptr, scale);
  }
  return token.position;
}

template <typename T, typename Kv, int kLanes, int kHeads, bool kVector, typename Params>
__global__ void __launch_bounds__(kAttendThreads, 2)
    attention_kernel(const Params p, int64_t tiles) {
  __shared__ AttendShared<T, Kv, kLanes, kHeads> shared;
  const HeadTile tile = head_tile<kHeads>(p, tiles);
  if (!has_token(p, tile.token)) return;
  const int head_dim = static_cast<int>(p.head_dim);
  T* out =
      static_cast<T*>(p.out) + tile.token * p.out_stride + tile.first_q_head * p.out_head_stride;
  const Token token = attended_token(p, tile.token);
  if (token.length == 0) {
    for (int i = threadIdx.x; i < tile.heads * head_dim; i += kAttendThreads) {
      out[i / head_dim * p.out_head_stride + i % head_dim] = from_float<T>(0.0f);
    }
    return;
  }
  const int32_t new_position = stage_token(p, tile, token, shared);
  __syncthreads();
  LaneSoftmax<kHeads> state;
  scan_context<T, Kv, kLanes, kHeads, kVector>(
      p.cache, {token, tile.kv_head, new_position, head_dim, p.scale}, shared, state);
  merge_groups(shared, state, out, p.out_head_stride, tile.heads, head_dim);
}

// Query heads of one KV head go through a CTA in tiles; the size of a tile changes no result.
template <typename T, typename Kv, int kLanes, bool kVector, int kHeads, typename Params>
int launch_tiles(const Params& p, void* stream) {
  const int64_t tiles = ceil_div(p.q_heads / p.kv_heads, kHeads);
  return launch(attention_kernel<T, Kv, kLanes, kHeads, kVector, Params>,
                p.tokens * p.kv_heads * tiles, kAttendThreads, stream, p, tiles);
}

template <typename T, typename Kv, int kLanes, typename Params>
int launch_lanes(const Params& p, bool vectors, void* stream) {
  if (!vectors) return launch_tiles<T, Kv, kLanes, false, 1>(p, stream);
  if (p.q_heads <= 2 * p.kv_heads) return launch_tiles<T, Kv, kLanes, true, 2>(p, stream);
  return launch_tiles<T, Kv, kLanes, true, 4>(p, stream);
}

// Keys and values are Kv.
template <typename T, typename Kv, typename Params>
int launch_attention(const Params& p, void* stream) {
  const bool vectors = p.head_dim % kPack == 0 && has_cache_vectors(p.cache, p.dtype);
  if (p.head_dim <= 8 * kPack) return launch_lanes<T, Kv, 8>(p, vectors, stream);
  if (p.head_dim <= 16 * kPack) return launch_lanes<T, Kv, 16>(p, vectors, stream);
  return launch_lanes<T, Kv, 32>(p, vectors, stream);
}

}  // namespace photon::cuda
