// The narrow linears of weights of fewer bits: their launches by load stage, op and number of
// tokens.
#pragma once
#include "cuda/linear/narrow_launch.cuh"

namespace photon::cuda::stream_linear {

// Of rows of so many bytes, of which a K chunk has `chunk_bytes`.
inline narrow::ScaleSource source_of(const void* from, int64_t row_bytes, int64_t chunk_bytes) {
  const int64_t all =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(from)) | row_bytes | chunk_bytes | 16;
  const int64_t part = all & -all;  // the largest power of two that divides them all
  return {static_cast<const char*>(from), static_cast<int>(row_bytes / part), log2_of(part),
          log2_of(chunk_bytes / part)};
}

inline narrow::StoredScales scales_of(const Weight& w, int k_chunk) {
  const WeightScales& s = w.scales;
  const int64_t groups = ceil_div(w.k, s.columns), in_chunk = groups == 1 ? 1 : k_chunk / s.columns;
  const int64_t bytes = w.format == WeightFormat::kFp8 ? 4 : 2;
  narrow::StoredScales stored{};
  stored.scales = source_of(s.data, groups * bytes, in_chunk * bytes);
  if (s.zeros != nullptr) stored.zeros = source_of(s.zeros, groups, in_chunk);
  if (s.offsets != nullptr) stored.zeros = source_of(s.offsets, groups * bytes, in_chunk * bytes);
  stored.row_shift = log2_of(s.rows);
  stored.group_bits = log2_of(in_chunk / narrow::kWarps);
  stored.has_all_groups = s.columns <= 32;
  stored.is_half = s.dtype == DType::kF16;
  return stored;
}

// `p` describes all tokens; they go in groups. `MoreLoad`: that of more than 8.
template <typename Load, typename MoreLoad, Epilogue kEpilogue>
int launch_groups(narrow::StoredParams p, const LinearParams& op, void* stream) {
  // Registers have room for the sums of many tiles of 8 tokens, or of fewer of 16. A CTA
  // that has its SM alone holds more of 16: that pays where passes, each of which reads x, become
  // fewer.
  constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  using Few = narrow::Size<kAdds ? 4 : 12, 1, 1, Load>;
  using More = narrow::Size<4, 1, 2, MoreLoad>;
  using Wide = narrow::Size<kAdds ? 4 : 12, 1, 2, MoreLoad>;
  static_assert(More::kTokens == kStoredTokens && Wide::kTokens == kStoredTokens);
  const int tokens = p.tokens, k_chunk = Few::kChunk, sms = cuda::sms();
  p.split = kEpilogue == Epilogue::kAdd ? choose_split(p.n, p.k, sms, k_chunk) : 1;
  p.k_each = static_cast<int>(ceil_div(ceil_div(p.k, k_chunk), p.split)) * k_chunk;
  p.stored = scales_of(op.weight, k_chunk);
  const int blocks = deal_rows<kEpilogue>(p, sms);
  if (const int error = make_weight_maps<kEpilogue>(p, Load::kBlocks, op.weight.data,
                                                    op.weight.stride, k_chunk / Load::kBlocks))
    return error;
  for (; p.first_token < tokens; p.first_token += kStoredTokens) {
    p.tokens = std::min<int>(tokens - p.first_token, kStoredTokens);
    const bool is_wide = p.most_tiles > More::kTiles;
    const int error = p.tokens <= Few::kTokens
                          ? launch_narrow<Few, kEpilogue>(p, blocks, op.pdl, stream)
                      : is_wide ? launch_narrow<Wide, kEpilogue>(p, blocks, op.pdl, stream)
                                : launch_narrow<More, kEpilogue>(p, blocks, op.pdl, stream);
    if (error) return error;
    p.x += kStoredTokens * static_cast<int64_t>(p.x_stride);
    p.out += kStoredTokens * static_cast<int64_t>(p.out_stride);
  }
  return cudaSuccess;
}

template <typename Load, typename MoreLoad>
int launch_stored(const LinearParams& op, void* stream) {
  narrow::StoredParams p{};
  static_cast<Params&>(p) = params_of(op);
  return op.epilogue == Epilogue::kAdd
             ? launch_groups<Load, MoreLoad, Epilogue::kAdd>(p, op, stream)
             : launch_groups<Load, MoreLoad, Epilogue::kStore>(p, op, stream);
}

// Defined in narrow_int4.cu: there are many kernels.
int run_narrow_int4(const LinearParams& op, void* stream);

}  // namespace photon::cuda::stream_linear
