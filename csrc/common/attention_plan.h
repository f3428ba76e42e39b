// Which kernel attention runs on a GPU, and what limits each of them: said here alone, as
// linear_plan.h does for linears. No CUDA.
#pragma once
#include "balanced_plan.h"
#include "gpu.h"
#include "kv.h"
#include "kv_split.h"
#include "params.h"

namespace photon {

// Kernels of csrc/cuda/attention. Of paged_attention kBalanced and kChunk, of
// fused_attention_decode kBatchWarp, kWarp and kSplit; kPortable of both.
enum class AttentionKernel { kPortable, kChunk, kBalanced, kSplit, kWarp, kBatchWarp };

// The kernel's name in csrc/cuda/attention, less "_kernel".
constexpr const char* name_of(AttentionKernel kernel) {
  switch (kernel) {
    case AttentionKernel::kPortable:
      return "attention";
    case AttentionKernel::kChunk:
      return "chunk_attention";
    case AttentionKernel::kBalanced:
      return "balanced_attention";
    case AttentionKernel::kSplit:
      return "split_attention";
    case AttentionKernel::kWarp:
      return "warp_attention";
    case AttentionKernel::kBatchWarp:
      return "batch_attention";
  }
  return "";
}

// From this many tokens on, work items are enough for CTAs of one warp. With fewer a warp's own
// latency shows: 64 of 220 positions took 27.1 us, and 24.7 by four warps a CTA
// (benchmarks/FINDINGS.md). In an order of their own (`batch`) they win earlier: 64 of 220
// positions took 27.0 us, and 28.8 by four warps a CTA; 40 of them 19.6 and 24.6 (H100).
constexpr int64_t kWarpTokens = 97, kBatchWarpTokens = 33;
constexpr int64_t kWarpHeadDim = 128, kWarpSharers = 4;  // query heads of a KV head, at most
constexpr int64_t kChunkSharers = 64;
constexpr int64_t kCopyTokens = 16;         // positions of a page that one tensor copy brings
constexpr int64_t kBalancedTileKeys = 128;  // positions of a KV tile
constexpr int64_t kBalancedTileCost = 2;    // KV tiles that a query tile's begin and end count as
constexpr int64_t kSliceElements = 64;      // of a tensor copy: of a row of 128 bytes
constexpr int64_t kPackElements = 8;        // of bfloat16 in a vector
constexpr int64_t kFp8HeadDim = 128;        // of keys and values in fp8, at most
constexpr int64_t kSplitItemTokens = 64;    // positions of a work item of split attention, at least

// Bytes of shared memory of a CTA of chunk attention with the smaller tiles: 64 rows of queries,
// two tiles of 64 keys and two of values, and what it keeps of rows and dims; of keys and values in
// fp8 the scales of these tiles, too.
constexpr int64_t chunk_shared_bytes(int64_t head_dim, bool fp8) {
  return (64 * 2 + 4 * 64 * 2 + 4) * head_dim + 1664 + (fp8 ? 4 * 64 * 4 : 0);
}

constexpr const char* kHeadDims = "head_dim is none of 64, 96, 128 and 256";

constexpr bool has_split_head_dim(int64_t head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

constexpr const char* kFp8HeadDims =
    "keys and values are fp8, and head_dim is none of 64, 96 and 128";

inline bool has_cache_vectors(const KvCache& c, DType dtype) {
  const int64_t size = kv_element_size(c, dtype);
  const int64_t strides[] = {c.k_page_stride, c.k_token_stride, c.k_head_stride,
                             c.v_page_stride, c.v_token_stride, c.v_head_stride};
  for (const int64_t stride : strides) {
    if (stride * size % kVectorBytes != 0) return false;
  }
  return are_vector_aligned(c.k, c.v);
}

// --- what tensor copies and 32-bit indices take --------------------------------------------------

// Whether keys or values are rows of a token's stride: strides (in elements) are whole rows, or
// whole slices within a row, and a page has all of its heads.
inline bool is_tile_tensor(int64_t page, int64_t token, int64_t head, int64_t kv_heads,
                           int64_t pages) {
  const bool is_row = token > 0 && token % kSliceElements == 0 && page % token == 0 &&
                      head * (kv_heads - 1) < page && page / token * pages < INT32_MAX / 2;
  return is_row && (head % token == 0 || (head % kSliceElements == 0 && head * kv_heads <= token));
}

inline bool has_tile_tensors(const KvCache& c, int64_t kv_heads) {
  return is_tile_tensor(c.k_page_stride, c.k_token_stride, c.k_head_stride, kv_heads,
                        c.num_pages) &&
         is_tile_tensor(c.v_page_stride, c.v_token_stride, c.v_head_stride, kv_heads, c.num_pages);
}

// Whether vectors of the cache, scales and positions of a row are counted in 32 bits.
inline bool has_split_cache(const KvCache& c, int64_t kv_heads) {
  const auto end = [&](int64_t page, int64_t token, int64_t head) {
    return (c.num_pages * page + c.page_size * token + kv_heads * head) / kPackElements;
  };
  if (c.scales != nullptr && c.num_pages * 2 * c.scale_heads * c.page_size > UINT32_MAX)
    return false;
  return end(c.k_page_stride, c.k_token_stride, c.k_head_stride) < UINT32_MAX &&
         end(c.v_page_stride, c.v_token_stride, c.v_head_stride) < UINT32_MAX &&
         row_capacity(c) < INT32_MAX / 2 && c.page_size < INT32_MAX / 2;
}

// And strides, split-KV groups and work items of all tokens.
inline bool has_split_indices(const FusedAttentionDecodeParams& p) {
  const int64_t strides[] = {p.q_stride, p.q_head_stride, p.k_stride,   p.k_head_stride,
                             p.v_stride, p.v_head_stride, p.out_stride, p.out_head_stride};
  for (const int64_t stride : strides) {
    if (stride > INT32_MAX) return false;
  }
  const int64_t items = (row_capacity(p.cache) + kSplitItemTokens - 1) / kSplitItemTokens;
  return has_split_cache(p.cache, p.kv_heads) && p.tokens * p.q_heads < INT32_MAX / kMaxSplits &&
         p.tokens * p.q_heads * items < INT32_MAX / 2;
}

// --- decode --------------------------------------------------------------------------------------

// Why split attention does not take it.
inline Unsupported split_attention_unsupported(const FusedAttentionDecodeParams& p,
                                               const Gpu& gpu) {
  if (const Unsupported device = hopper_unsupported(gpu)) return device;
  if (p.dtype != DType::kBF16) return {kNotBf16};
  if (!has_split_head_dim(p.head_dim)) return {kHeadDims, p.head_dim};
  if (p.cache.scales != nullptr && p.head_dim > kFp8HeadDim) return {kFp8HeadDims, p.head_dim};
  if (p.workspace == nullptr) return {"there is no workspace"};
  // Telling a chunk's tokens inside the kernel cost a step 2 to 4 %: give the decode tokens alone.
  if (p.counts != nullptr) return {"counts are given"};
  const bool is_aligned = are_vector_aligned(p.workspace, p.rope.cos, p.rope.sin, p.rope.q_norm,
                                             p.rope.k_norm, p.out) &&
                          has_cache_vectors(p.cache, p.dtype) &&
                          are_whole_vectors(p.dtype, p.out_stride, p.out_head_stride);
  if (!is_aligned) return {kMisaligned};
  return has_split_indices(p) ? Unsupported{} : Unsupported{kTooLarge};
}

// Whether CTAs of one warp take what split attention takes: of keys and values in bfloat16, heads
// of 128, pages of whole tiles of 16 positions (or rows that are one page each), and strides of a
// tensor's rows; for a batch also queries, keys and values of whole vectors.
inline bool takes_one_warp_ctas(const FusedAttentionDecodeParams& p) {
  const bool has_vectors = are_vector_aligned(p.q, p.k, p.v) &&
                           are_whole_vectors(p.dtype, p.q_stride, p.q_head_stride, p.k_stride,
                                             p.k_head_stride, p.v_stride, p.v_head_stride);
  return p.tokens >= (p.batch ? kBatchWarpTokens : kWarpTokens) && p.cache.scales == nullptr &&
         p.head_dim == kWarpHeadDim && p.q_heads <= kWarpSharers * p.kv_heads &&
         (p.cache.page_table == nullptr || p.cache.page_size % kCopyTokens == 0) &&
         has_tile_tensors(p.cache, p.kv_heads) && (!p.batch || has_vectors);
}

inline KernelChoice<AttentionKernel> plan_attention(const FusedAttentionDecodeParams& p,
                                                    const Gpu& gpu) {
  if (!p.hopper) return {AttentionKernel::kPortable};
  if (const Unsupported why = split_attention_unsupported(p, gpu))
    return {AttentionKernel::kPortable, why};
  if (!takes_one_warp_ctas(p)) return {AttentionKernel::kSplit};
  return {p.batch ? AttentionKernel::kBatchWarp : AttentionKernel::kWarp};
}

// --- chunks --------------------------------------------------------------------------------------

// Why chunk attention does not take it, which runs on GPUs from 8.0 on.
inline Unsupported chunk_attention_unsupported(const PagedAttentionParams& p, const Gpu& gpu) {
  if (gpu.major < 8) return {"the device's compute capability is below 8.0"};
  if (p.dtype != DType::kBF16) return {kNotBf16};
  const bool is_aligned =
      are_vector_aligned(p.out, p.q) && has_cache_vectors(p.cache, p.dtype) &&
      are_whole_vectors(p.dtype, p.q_stride, p.q_head_stride, p.out_stride, p.out_head_stride);
  if (!is_aligned) return {kMisaligned};
  const bool is_small =
      p.tokens <= INT32_MAX / 2 && p.cache.pages_per_row * p.cache.page_size <= INT32_MAX / 2;
  if (!is_small) return {kTooLarge};
  if (!(p.scale > 0.0f)) return {"scale is not above 0"};
  if (p.cache.num_pages == 0) return {"the cache has no pages"};
  if (!has_split_head_dim(p.head_dim)) return {kHeadDims, p.head_dim};
  const bool fp8 = p.cache.scales != nullptr;
  if (fp8 && p.head_dim > kFp8HeadDim) return {kFp8HeadDims, p.head_dim};
  if (p.q_heads > kChunkSharers * p.kv_heads)
    return {"a KV head has more than 64 query heads", p.q_heads / p.kv_heads};
  if (gpu.shared_bytes < chunk_shared_bytes(p.head_dim, fp8))
    return {"the device has too little shared memory"};
  return {};
}

// Why balanced attention does not take what chunk attention takes.
inline Unsupported balanced_attention_unsupported(const PagedAttentionParams& p, const Gpu& gpu) {
  if (const Unsupported device = hopper_unsupported(gpu)) return device;
  if (p.cache.scales != nullptr)
    return {"keys and values are fp8, which balanced attention does not read"};
  if (!is_vector_aligned(p.workspace)) return {"the workspace is not aligned to 16 bytes"};
  if (!is_vector_aligned(p.plan)) return {"the plan is not aligned to 16 bytes"};
  if (p.head_dim != 64 && p.head_dim != 128) return {"head_dim is neither 64 nor 128", p.head_dim};
  if (p.cache.page_size % kCopyTokens != 0)
    return {"the page size is not a multiple of 16", p.cache.page_size};
  if (!has_tile_tensors(p.cache, p.kv_heads))
    return {"a tensor copy does not take the cache's strides"};
  if (p.tokens > kBalancedTokens) return {"a step of more than 4,096 tokens"};
  const int64_t kv_tiles =
      (row_capacity(p.cache) + kBalancedTileKeys - 1) / kBalancedTileKeys + kBalancedTileCost;
  // with `exact` for all steps alike, whatever their size
  const int64_t tokens = p.exact ? kBalancedTokens : p.tokens;
  return tokens * kv_tiles * p.kv_heads > INT32_MAX ? Unsupported{kTooLarge} : Unsupported{};
}

inline KernelChoice<AttentionKernel> plan_attention(const PagedAttentionParams& p, const Gpu& gpu) {
  if (!p.hopper) return {AttentionKernel::kPortable};
  if (const Unsupported why = chunk_attention_unsupported(p, gpu))
    return {AttentionKernel::kPortable, why};
  if (p.workspace == nullptr) return {AttentionKernel::kChunk};
  const Unsupported why = balanced_attention_unsupported(p, gpu);
  return {why ? AttentionKernel::kChunk : AttentionKernel::kBalanced, why};
}

}  // namespace photon
