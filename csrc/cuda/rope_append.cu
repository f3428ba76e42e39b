// rope_append_kv: the query heads of chunk tokens are normalized and rotated in place, KV heads are
// normalized, rotated and copied into the row's page.
//
// A CTA has some heads of one token. Of each head a lane has kPack elements of the first half and
// the kPack that they rotate with, of the second.
#include <algorithm>

#include "common/kv.h"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace {

constexpr int kMostThreads = 256;

template <typename T>
struct PackPair {
  Pack<T> low, high;

  // Zeros past the half's end; none of it is there where `count` is not above 0.
  template <bool kVector>
  __device__ static PackPair load(const T* half_pack, int half, int count) {
    return {load_pack<kVector>(half_pack, count), load_pack<kVector>(half_pack + half, count)};
  }

  template <bool kVector>
  __device__ void store(T* half_pack, int half, int count) const {
    store_pack<kVector>(half_pack, low, count);
    store_pack<kVector>(half_pack + half, high, count);
  }
};

// RMS norm of a head that `lanes` lanes hold, with transformers' roundings: weight * round(x *
// scale), rounded. All lanes of the warp must call it.
template <typename T>
__device__ void norm_pairs(PackPair<float>& x, const PackPair<T>& weight, float eps, int head_dim,
                           int lanes) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    squares = fmaf(x.high.e[i], x.high.e[i], fmaf(x.low.e[i], x.low.e[i], squares));
  for (int offset = 1; offset < lanes; offset *= 2)
    squares += __shfl_xor_sync(kFullWarp, squares, offset);
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(head_dim) + eps);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    x.low.e[i] = rounded<T>(rounded<T>(x.low.e[i] * scale) * to_float(weight.low.e[i]));
    x.high.e[i] = rounded<T>(rounded<T>(x.high.e[i] * scale) * to_float(weight.high.e[i]));
  }
}

// Norm (where there is a `weight`) and rotation in float32, rounded once to T. All lanes of the
// warp must call it; `count` as in PackPair::load.
template <typename T, bool kVector>
__device__ PackPair<T> rotate(const RopeAppendKvParams& p, const T* head, const T* weight,
                              int32_t position, int first, int count, int lanes) {
  const int head_dim = static_cast<int>(p.head_dim), half = head_dim / 2;
  const int64_t at = static_cast<int64_t>(position) * head_dim + first;
  const auto x = PackPair<T>::template load<kVector>(head + first, half, count);
  const auto cos = PackPair<float>::load<kVector>(p.rope.cos + at, half, count);
  const auto sin = PackPair<float>::load<kVector>(p.rope.sin + at, half, count);
  PackPair<float> v;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    v.low.e[i] = to_float(x.low.e[i]);
    v.high.e[i] = to_float(x.high.e[i]);
  }
  const bool normed = weight != nullptr;  // the same for all query heads, and for all KV heads
  const auto gain =
      PackPair<T>::template load<kVector>(normed ? weight + first : head, half, normed ? count : 0);
  PackPair<float> normalized = v;
  norm_pairs(normalized, gain, p.rope.eps, head_dim, lanes);
  if (normed) v = normalized;
  PackPair<T> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    out.low.e[i] = from_float<T>(fmaf(v.low.e[i], cos.low.e[i], -(v.high.e[i] * sin.low.e[i])));
    out.high.e[i] = from_float<T>(fmaf(v.high.e[i], cos.high.e[i], v.low.e[i] * sin.high.e[i]));
  }
  return out;
}

// `lanes` of a head, a power of two; `groups` of heads, each with a CTA.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kMostThreads)
    rope_append_kv_kernel(const RopeAppendKvParams p, int lanes, int groups) {
  wait_for_earlier();
  const int index = static_cast<int>(blockIdx.x) / groups,
            group = static_cast<int>(blockIdx.x) % groups;
  if (!is_chunk_token(p.counts, index)) return;
  const Token token = load_token(p.decode_meta, index);
  if (!can_rotate(p.rope, token)) return;
  const int thread = group * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int q_heads = static_cast<int>(p.q_heads), kv_heads = static_cast<int>(p.kv_heads);
  const int head = min(thread / lanes, q_heads + kv_heads - 1), kv_head = head - q_heads;
  const int half = static_cast<int>(p.head_dim) / 2, first = thread % lanes * kPack;
  const int count = thread / lanes == head ? half - first : 0;
  T* const q = static_cast<T*>(p.q) + index * p.q_stride + head * p.q_head_stride;
  const auto kv_at = [&](const void* kv, int64_t stride, int64_t head_stride) {
    return static_cast<const T*>(kv) + index * stride + kv_head * head_stride;
  };
  const bool is_query = kv_head < 0;
  const T* const from = is_query ? q : kv_at(p.k, p.k_stride, p.k_head_stride);
  const T* const weight = static_cast<const T*>(is_query ? p.rope.q_norm : p.rope.k_norm);
  const KvPlace place = own_place(p.cache, token);
  const PackPair<T> rotated =
      rotate<T, kVector>(p, from, weight, token.position, first, count, lanes);
  if (is_query) return rotated.template store<kVector>(q + first, half, count);
  if (place.page < 0) return;
  const auto v = PackPair<T>::template load<kVector>(
      kv_at(p.v, p.v_stride, p.v_head_stride) + first, half, count);
  rotated.template store<kVector>(
      static_cast<T*>(p.cache.k) + place.k_offset(p.cache, kv_head) + first, half, count);
  v.template store<kVector>(static_cast<T*>(p.cache.v) + place.v_offset(p.cache, kv_head) + first,
                            half, count);
}

bool can_use_vectors(const RopeAppendKvParams& p) {
  const KvCache& c = p.cache;
  const RopeParams& r = p.rope;
  for (const void* pointer :
       {static_cast<const void*>(p.q), p.k, p.v, static_cast<const void*>(c.k),
        static_cast<const void*>(c.v), static_cast<const void*>(r.cos),
        static_cast<const void*>(r.sin), r.q_norm, r.k_norm}) {
    if (!is_vector_aligned(pointer)) return false;
  }
  return p.head_dim % (2 * kPack) == 0 &&
         are_whole_vectors(p.dtype, p.q_stride, p.q_head_stride, p.k_stride, p.k_head_stride,
                           p.v_stride, p.v_head_stride, c.k_page_stride, c.k_token_stride,
                           c.k_head_stride, c.v_page_stride, c.v_token_stride, c.v_head_stride);
}

}  // namespace

int rope_append_kv(const RopeAppendKvParams& p, void* stream) {
  const int64_t heads = p.q_heads + p.kv_heads;
  if (p.tokens == 0 || heads == 0) return 0;
  int lanes = 1;
  while (lanes * kPack < p.head_dim / 2) lanes *= 2;
  const int64_t warps = ceil_div(heads * lanes, kWarpSize);
  const int threads = static_cast<int>(std::min<int64_t>(warps * kWarpSize, kMostThreads));
  const int64_t groups = ceil_div(heads * lanes, threads);
  const LaunchShape shape = waiting_shape(p.tokens * groups, threads);
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel =
        can_use_vectors(p) ? rope_append_kv_kernel<T, true> : rope_append_kv_kernel<T, false>;
    return launch(kernel, shape, stream, p, lanes, static_cast<int>(groups));
  });
}

}  // namespace photon::cuda
