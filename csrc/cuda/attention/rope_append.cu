// rope_append_kv: the query heads of chunk tokens are normalized and rotated in place, KV heads are
// normalized, rotated and copied into the row's page.
//
// A CTA has some heads of q, k and v of one token. Of each head a lane has kPack elements of the
// first half and the kPack that they rotate with, of the second. It waits for memory twice: for
// these and the token, then for what the token says where to find.
#include "common/attention_plan.h"
#include "common/kv.h"
#include "cuda/attention/kv_pack.cuh"
#include "cuda/divisor.cuh"
#include "cuda/element.cuh"
#include "cuda/fresh_pack.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/linear/norm.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {
namespace {

constexpr int kMostThreads = 64;
// Of an SM: leaves a thread 56 registers, which are enough for what models have.
template <typename T, bool kVector, bool kFp8>
constexpr int kCtas = kVector && !kFp8 && sizeof(T) == 2 ? 18 : 1;

// How the heads of a token are dealt out.
struct HeadGrid {
  int lane_bits = 0;  // a head has 2^lane_bits lanes
  int warps;          // of a CTA
  Divisor ctas;       // of a token: as many as it takes, with equally many warps

  explicit HeadGrid(const RopeAppendKvParams& p) {
    while ((kPack << lane_bits) < p.head_dim / 2) ++lane_bits;
    const int64_t lanes = (p.q_heads + 2 * p.kv_heads) << lane_bits;
    const int64_t all_warps = ceil_div(lanes, kWarpSize);
    ctas = Divisor(ceil_div(all_warps * kWarpSize, kMostThreads));
    warps = static_cast<int>(ceil_div(all_warps, ctas.of));
  }
};

template <typename T>
struct PackPair {
  Pack<T> low, high;

  // Zeros past the half's end; none of it is there where `count` is not above 0.
  template <bool kVector>
  __device__ static PackPair load(const T* half_pack, int half, int count) {
    return {load_pack<kVector>(half_pack, count), load_pack<kVector>(half_pack + half, count)};
  }

  // The same, here and not where it is used.
  template <bool kVector>
  __device__ static PackPair load_fresh(const T* half_pack, int half, int count) {
    return {load_fresh_pack<kVector>(half_pack, count),
            load_fresh_pack<kVector>(half_pack + half, count)};
  }

  template <bool kVector>
  __device__ void store(T* half_pack, int half, int count) const {
    store_pack<kVector>(half_pack, low, count);
    store_pack<kVector>(half_pack + half, high, count);
  }
};

// Of half a head's angles, which repeat in the other half.
struct PackAngles {
  Pack<float> cos, sin;

  template <bool kVector>
  __device__ static PackAngles load(const RopeParams& rope, int64_t at, int count) {
    return {load_pack<kVector>(rope.cos + at, count), load_pack<kVector>(rope.sin + at, count)};
  }
};

// RMS norm of a head, whose lanes are those of `mask`, with transformers' roundings.
template <typename T>
__device__ void norm_head(PackPair<T>& x, const PackPair<T>& gain, float eps, int head_dim,
                          int lanes, unsigned mask) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float2 low = to_floats(get_pair(x.low, i)), high = to_floats(get_pair(x.high, i));
    squares = fmaf(high.x, high.x, fmaf(low.x, low.x, squares));
    squares = fmaf(high.y, high.y, fmaf(low.y, low.y, squares));
  }
  for (int offset = 1; offset < lanes; offset *= 2)
    squares += __shfl_xor_sync(mask, squares, offset);
  const float scale = norm_scale(squares, head_dim, eps);
  x = {normalized(x.low, gain.low, scale), normalized(x.high, gain.high, scale)};
}

// In float32, rounded once.
template <typename T>
__device__ PackPair<T> rotated(const PackPair<T>& x, const PackAngles& angles) {
  PackPair<T> out;
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float2 low = to_floats(get_pair(x.low, i)), high = to_floats(get_pair(x.high, i)),
                 cos = get_pair(angles.cos, i), sin = get_pair(angles.sin, i);
    set_pair(out.low, i,
             from_floats<T>(fmaf(low.x, cos.x, -(high.x * sin.x)),
                            fmaf(low.y, cos.y, -(high.y * sin.y))));
    set_pair(
        out.high, i,
        from_floats<T>(fmaf(high.x, cos.x, low.x * sin.x), fmaf(high.y, cos.y, low.y * sin.y)));
  }
  return out;
}

// A head of the cache as e4m3 bytes, by its lanes, which are those of `mask`.
template <bool kVector, typename T>
__device__ void store_fp8(const PackPair<T>& x, E4m3* half_pack, float* scale, int half, int count,
                          int lanes, unsigned mask) {
  const uint32_t low = largest_magnitude(x.low), high = largest_magnitude(x.high);
  const float own = e4m3_scale(largest_of(low > high ? low : high, lanes, mask));
  store_kv<kVector>(half_pack, encoded(x.low, own), count);
  store_kv<kVector>(half_pack + half, encoded(x.high, own), count);
  if (count == half) *scale = own;  // of the head's first lane
}

__device__ inline Token load_fresh_token(const int32_t* decode_meta, int64_t index) {
  const int32_t* meta = decode_meta + index * kMetaColumns;
  return {load_fresh(meta + kMetaPosition), load_fresh(meta + kMetaLength),
          load_fresh(meta + kMetaRow)};
}

template <typename T, bool kVector, bool kFp8>
__global__ void __launch_bounds__(kMostThreads, kCtas<T, kVector, kFp8>)
    rope_append_kv_kernel(const RopeAppendKvParams p, const HeadGrid grid) {
  wait_for_earlier();
  let_next_start();  // what it has to find out first takes balanced_attention longer than this
  const int index = static_cast<int>(grid.ctas.divides(blockIdx.x)),
            part = static_cast<int>(blockIdx.x - index * grid.ctas.of);
  const int thread = part * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x),
            lanes = 1 << grid.lane_bits;
  const int q_heads = static_cast<int>(p.q_heads), kv_heads = static_cast<int>(p.kv_heads);
  const int head = thread >> grid.lane_bits, key_head = head - q_heads,
            value_head = key_head - kv_heads;
  if (value_head >= kv_heads) return;
  const bool is_query = key_head < 0, is_value = value_head >= 0;
  const int kv_head = is_value ? value_head : key_head;
  const int head_dim = static_cast<int>(p.head_dim), half = head_dim / 2;
  const int first = (thread & (lanes - 1)) * kPack, count = half - first;

  T* const q = static_cast<T*>(p.q) + index * p.q_stride + head * p.q_head_stride + first;
  const auto kv_at = [&](const void* kv, int64_t stride, int64_t head_stride) {
    return static_cast<const T*>(kv) + index * stride + kv_head * head_stride + first;
  };
  const T* const from = is_query   ? q
                        : is_value ? kv_at(p.v, p.v_stride, p.v_head_stride)
                                   : kv_at(p.k, p.k_stride, p.k_head_stride);
  const T* const weight = static_cast<const T*>(is_query ? p.rope.q_norm : p.rope.k_norm);
  const bool is_normed = weight != nullptr && !is_value;
  auto x = PackPair<T>::template load_fresh<kVector>(from, half, count);
  const Token token = load_fresh_token(p.decode_meta, index);
  if (p.counts != nullptr && index < load_fresh(p.counts + kCountDecodeTokens)) return;
  if (!can_rotate(p.rope, token)) return;

  const auto gain = PackPair<T>::template load<kVector>(is_normed ? weight + first : from, half,
                                                        is_normed ? count : 0);
  const auto angles = PackAngles::load<kVector>(
      p.rope, static_cast<int64_t>(token.position) * head_dim + first, is_value ? 0 : count);
  const KvPlace place = is_query ? KvPlace{-1, 0} : own_place(p.cache, token);
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned mask = ((1u << lanes) - 1) << (lane & ~static_cast<unsigned>(lanes - 1));
  const auto append = [&](const PackPair<T>& head, void* cache, int64_t at, int64_t scale_at) {
    if constexpr (kFp8) {
      store_fp8<kVector>(head, static_cast<E4m3*>(cache) + at + first, p.cache.scales + scale_at,
                         half, count, lanes, mask);
    } else {
      head.template store<kVector>(static_cast<T*>(cache) + at + first, half, count);
    }
  };
  if (is_value) {
    if (place.page < 0) return;
    return append(x, p.cache.v, place.v_offset(p.cache, kv_head),
                  place.v_scale_offset(p.cache, kv_head));
  }
  if (is_normed) {
    norm_head(x, gain, p.rope.eps, head_dim, lanes, mask);
  }
  const PackPair<T> out = rotated(x, angles);
  if (is_query) return out.template store<kVector>(q, half, count);
  if (place.page < 0) return;
  append(out, p.cache.k, place.k_offset(p.cache, kv_head), place.k_scale_offset(p.cache, kv_head));
}

bool can_use_vectors(const RopeAppendKvParams& p) {
  const RopeParams& r = p.rope;
  for (const void* pointer :
       {static_cast<const void*>(p.q), p.k, p.v, static_cast<const void*>(r.cos),
        static_cast<const void*>(r.sin), r.q_norm, r.k_norm}) {
    if (!is_vector_aligned(pointer)) return false;
  }
  return p.head_dim % (2 * kPack) == 0 && has_cache_vectors(p.cache, p.dtype) &&
         are_whole_vectors(p.dtype, p.q_stride, p.q_head_stride, p.k_stride, p.k_head_stride,
                           p.v_stride, p.v_head_stride);
}

template <typename T>
auto kernel_for(const RopeAppendKvParams& p) {
  const bool vectors = can_use_vectors(p);
  if (p.cache.scales != nullptr)
    return vectors ? rope_append_kv_kernel<T, true, true> : rope_append_kv_kernel<T, false, true>;
  return vectors ? rope_append_kv_kernel<T, true, false> : rope_append_kv_kernel<T, false, false>;
}

}  // namespace

int rope_append_kv(const RopeAppendKvParams& p, void* stream) {
  if (p.tokens == 0 || p.q_heads + p.kv_heads == 0) return 0;
  const HeadGrid grid(p);
  const LaunchShape shape = waiting_shape(p.tokens * grid.ctas.of, grid.warps * kWarpSize);
  return with_dtype(p.dtype, [&](auto tag) {
    return launch(kernel_for<typename decltype(tag)::type>(p), shape, stream, p, grid);
  });
}

}  // namespace photon::cuda
