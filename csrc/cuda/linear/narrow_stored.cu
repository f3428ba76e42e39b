// The narrow linears of weights of fewer bits: their launches by format, op and number of tokens.
#include "cuda/linear/narrow_launch.cuh"
#include "cuda/linear/stream_linear.h"

namespace photon::cuda {
namespace stream_linear {
namespace {

using narrow::Fp8Load, narrow::Int4Load, narrow::StoredParams, narrow::StoredScales;

int log2(int64_t power) {
  int bits = 0;
  while (power > int64_t{1} << bits) ++bits;
  return bits;
}

StoredScales scales_of(const Weight& w, int k_chunk) {
  const WeightScales& s = w.scales;
  const int64_t groups = ceil_div(w.k, s.columns), in_chunk = k_chunk / s.columns;
  const int64_t bytes = w.format == WeightFormat::kFp8 ? 4 : 2;
  StoredScales stored{};
  stored.scales = static_cast<const uint32_t*>(s.data);
  stored.zeros = reinterpret_cast<const uint32_t*>(s.zeros);
  stored.row_words = static_cast<int>(groups * bytes / 4);
  stored.row_zero_words = static_cast<int>(groups / 4);
  stored.row_shift = log2(s.rows);
  stored.word_bits = groups == 1 ? 0 : log2(in_chunk * bytes / 4);
  stored.zero_bits = s.zeros == nullptr ? 0 : log2(in_chunk / 4);
  const int scale_bytes = kTileRows * 4 << stored.word_bits;
  stored.zeros_at = s.zeros == nullptr ? 0 : scale_bytes;
  stored.tile_bytes = scale_bytes + (s.zeros == nullptr ? 0 : kTileRows * 4 << stored.zero_bits);
  stored.are_pairs = stored.word_bits > 0 && stored.row_words % 2 == 0 &&
                     reinterpret_cast<uintptr_t>(s.data) % 8 == 0;
  stored.is_half = s.dtype == DType::kF16;
  return stored;
}

// `p` describes all tokens; they go in groups. `MoreLoad`: that of more than 8.
template <typename Load, typename MoreLoad, Epilogue kEpilogue>
int launch_groups(StoredParams p, const LinearParams& op, void* stream) {
  // Registers have room for the sums of many tiles of 8 tokens, or of fewer of 16 and 32.
  using Few = narrow::Size<kEpilogue == Epilogue::kAdd ? 4 : 10, 2, 1, Load>;
  using More = narrow::Size<4, 1, 2, MoreLoad>;
  using Most = narrow::Size<kEpilogue == Epilogue::kAdd ? 4 : 6, 1, 4, MoreLoad>;
  static_assert(Most::kTokens == kStoredTokens);
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
    const int error =
        p.tokens <= Few::kTokens    ? launch_narrow<Few, kEpilogue>(p, blocks, op.pdl, stream)
        : p.tokens <= More::kTokens ? launch_narrow<More, kEpilogue>(p, blocks, op.pdl, stream)
                                    : launch_narrow<Most, kEpilogue>(p, blocks, op.pdl, stream);
    if (error) return error;
    p.x += kStoredTokens * static_cast<int64_t>(p.x_stride);
    p.out += kStoredTokens * static_cast<int64_t>(p.out_stride);
  }
  return cudaSuccess;
}

template <typename Load, typename MoreLoad>
int launch_op(const LinearParams& op, void* stream) {
  StoredParams p{};
  static_cast<Params&>(p) = params_of(op);
  return op.epilogue == Epilogue::kAdd
             ? launch_groups<Load, MoreLoad, Epilogue::kAdd>(p, op, stream)
             : launch_groups<Load, MoreLoad, Epilogue::kStore>(p, op, stream);
}

}  // namespace
}  // namespace stream_linear

int run_narrow_stored(const LinearParams& op, void* stream) {
  using namespace stream_linear;
  if (op.weight.format == WeightFormat::kFp8) return launch_op<Fp8Load, Fp8Load>(op, stream);
  return op.weight.scales.columns < kScaleBlock
             ? launch_op<Int4Load<4, 2>, Int4Load<4, 1>>(op, stream)
             : launch_op<Int4Load<1, 2>, Int4Load<1, 1>>(op, stream);
}

}  // namespace photon::cuda
