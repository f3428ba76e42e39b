// Which kernel a linear runs on a GPU, and what limits each of them: said here alone. The launchers
// ask, and so does whoever wants to know without a GPU (csrc/python/plans.cpp). No CUDA.
#pragma once
#include "block_layout.h"
#include "gpu.h"
#include "linear.h"

namespace photon {

// Kernels of csrc/cuda/linear. kNarrow, kMid and kLarge give a token the same bits; those of kBatch
// depend on the number of tokens. Of Hopper kernels kNarrow, kMidStored, kBatchStored and
// kBatchFp8 read weights of fewer bits: the first two give a token the same bits, those of the
// other two depend on the number of tokens. kBatchFp8 alone reads x in fp8, and nothing else.
enum class LinearKernel {
  kTile,
  kNarrow,
  kMid,
  kMidStored,
  kLarge,
  kBatch,
  kBatchStored,
  kBatchFp8
};

// The kernel's name in csrc/cuda/linear, less "_kernel".
constexpr const char* name_of(LinearKernel kernel) {
  switch (kernel) {
    case LinearKernel::kTile:
      return "tile";
    case LinearKernel::kNarrow:
      return "narrow";
    case LinearKernel::kMid:
      return "mid";
    case LinearKernel::kMidStored:
      return "mid_stored";
    case LinearKernel::kLarge:
      return "large";
    case LinearKernel::kBatch:
      return "batch";
    case LinearKernel::kBatchStored:
      return "batch_stored";
    case LinearKernel::kBatchFp8:
      return "batch_fp8";
  }
  return "";
}

constexpr int64_t kNarrowTokens = 8, kMidTokens = 64;  // of a launch, at most
constexpr int64_t kStoredTokens = 16;                  // of kNarrow, of a weight of fewer bits;
constexpr int64_t kMidStoredTokens = 64;               // and of kMidStored
constexpr int64_t kHopperColumns = 64;                 // columns come in multiples of this
constexpr int64_t kHopperOutputs = 8;       // and outputs, where they are added or of a batch
constexpr int64_t kMaxNormColumns = 16384;  // that are normalized: the norm's weight, or a token,
                                            // lies in a CTA
constexpr int64_t kMaxColumns = INT32_MAX / 16;         // offsets in bytes are of 32 bits
constexpr int64_t kMaxStride = INT32_MAX / 8;           // of a few tokens, in elements
constexpr int64_t kMaxBatchSize = INT32_MAX / 2 - 256;  // tokens and outputs of a batch

// Words (float32) of the workspace of a linear that first brings x into another form: of each k
// values of 16 bits and a scale; or for a weight of fewer bits also a float32 for each 32 columns
// and eight sums, of whole eights of tokens.
constexpr int64_t linear_workspace_words(int64_t tokens, int64_t k) {
  return tokens * ((k + 1) / 2) + (tokens + 7) / 8 * 8 * ((k + 31) / 32 + 8);
}

// The same of a linear whose output is normalized: sums of up to four parts of the columns.
constexpr int64_t linear_norm_workspace_words(int64_t tokens, int64_t n) { return 4 * tokens * n; }

// Which kernel with the fixed order of summation takes this many tokens in a launch.
constexpr LinearKernel kernel_of_group(int64_t tokens) {
  return tokens <= kNarrowTokens ? LinearKernel::kNarrow : LinearKernel::kMid;
}

// Whether its Hopper kernels are those of a batch: the ops have one kind or the other.
inline bool is_batch_linear(const LinearParams& p) {
  return p.prologue == Prologue::kNone && p.epilogue != Epilogue::kAdd;
}

// Of a weight of fewer bits: what Hopper kernels read of it.
inline Unsupported stored_unsupported(const LinearParams& p) {
  const Weight& w = p.weight;
  const WeightScales& s = w.scales;
  if (w.format != WeightFormat::kFp8 && !is_int(w.format))
    return {"of weights of fewer bits they read fp8, int4 and int8"};
  if (p.outputs() % kHopperOutputs != 0)
    return {"the number of outputs is no multiple of 8", p.outputs()};
  if (w.format == WeightFormat::kFp8)
    return w.k % 128 == 0 ? Unsupported{}
                          : Unsupported{"columns of fp8 are no multiple of 128", w.k};
  if (w.k % 256 != 0) return {"columns of integers are no multiple of 256", w.k};
  if (s.dtype == DType::kF32)
    return {"scales of integers are float32, and they read those of 16 bits"};
  if ((w.format == WeightFormat::kInt8 || s.offsets != nullptr) && s.dtype != DType::kF16)
    return {"scales of int8, or beside offsets, are not float16"};
  if (w.format == WeightFormat::kInt8) {
    if (s.columns != 16 && s.columns != 32)
      return {"groups of int8 have not 16 or 32 columns", s.columns};
    return {};
  }
  if (s.columns != 32 && s.columns != 64 && s.columns != kScaleBlock)
    return {"groups of int4 have not 32, 64 or 128 columns", s.columns};
  if (s.offsets != nullptr && s.columns != 32)
    return {"groups of int4 with offsets have not 32 columns", s.columns};
  const int64_t groups = w.k / s.columns;
  if (s.zeros != nullptr && groups % 4 != 0)
    return {"the groups of a row with zero points are no multiple of 4", groups};
  return {};
}

// Of x in fp8: what it is multiplied by.
inline Unsupported fp8_tokens_unsupported(const LinearParams& p) {
  const WeightScales& s = p.weight.scales;
  if (!is_batch_linear(p)) return {"only the linears of a batch read x in fp8"};
  if (p.weight.format != WeightFormat::kFp8) return {"x is in fp8, and the weight is not"};
  const bool of_rows = s.rows == 1 && s.columns >= p.weight.k;
  if (!of_rows && s.rows != kScaleBlock)
    return {"x is in fp8, and the weight has neither a scale a row nor one a block"};
  return {};
}

// Of sizes: what all Hopper kernels ask.
inline Unsupported hopper_sizes_unsupported(const LinearParams& p) {
  const Weight& w = p.weight;
  const bool takes_any = !is_batch_linear(p) && p.epilogue != Epilogue::kAdd;
  if (p.dtype != DType::kBF16) return {kNotBf16};
  if (p.x_scales != nullptr) {
    if (const Unsupported tokens = fp8_tokens_unsupported(p)) return tokens;
  }
  if (w.format != WeightFormat::kDense) {
    if (const Unsupported stored = stored_unsupported(p)) return stored;
  }
  if (w.k <= 0 || w.k % kHopperColumns != 0)
    return {"the number of columns is no multiple of 64", w.k};
  if (p.prologue == Prologue::kRmsNorm && w.k > kMaxNormColumns)
    return {"there are more than 16384 columns to normalize", w.k};
  if (p.epilogue == Epilogue::kAddNorm && w.n > kMaxNormColumns)
    return {"there are more than 16384 columns to normalize", w.n};
  if (!takes_any && p.outputs() % kHopperOutputs != 0)
    return {"the number of outputs is no multiple of 8", p.outputs()};
  return w.k <= kMaxColumns ? Unsupported{} : Unsupported{kTooLarge};
}

// Whether addresses are multiples of four bytes.
inline bool are_words(const void* one, const void* other) {
  return (reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other)) % 4 == 0;
}

// Whether scales can be read as kernels do it: those of small groups in vectors.
inline bool are_scales_aligned(const Weight& w) {
  const WeightScales& s = w.scales;
  if (is_int(w.format) && s.columns <= 32 && !are_vector_aligned(s.data, s.offsets)) return false;
  return are_words(s.data, s.zeros);
}

// Of memory: whether what is read and written in vectors consists of them.
inline bool has_linear_vectors(const LinearParams& p) {
  const Weight& w = p.weight;
  const bool is_dense = w.format == WeightFormat::kDense;
  const int64_t x_stride = p.x_scales == nullptr ? p.x_stride : p.x_stride / 2;
  const bool reads =
      are_vector_aligned(p.x, w.data, p.norm_weight, p.residual) &&
      are_whole_vectors(p.dtype, x_stride, is_dense ? w.stride : w.stride / 2, p.residual_stride) &&
      (p.x_scales == nullptr || p.x_stride % 2 == 0) &&
      (is_dense || (w.stride % 2 == 0 && are_scales_aligned(w)));
  const bool writes = !is_batch_linear(p) || (are_vector_aligned(p.out, p.workspace) &&
                                              are_whole_vectors(p.dtype, p.out_stride));
  return reads && writes;
}

// Whether 32 bits index it, and rows lie apart.
inline bool has_linear_indices(const LinearParams& p) {
  const bool is_batch = is_batch_linear(p);
  const auto fits = [&](const void* rows, int64_t stride) {
    return rows == nullptr || (stride > 0 && (is_batch || stride <= kMaxStride));
  };
  if (!fits(p.out, p.out_stride) || !fits(p.residual, p.residual_stride)) return false;
  if (!fits(&p, p.x_stride) || !fits(&p, p.weight.stride)) return false;
  if (is_batch) return p.tokens <= kMaxBatchSize && p.outputs() <= kMaxBatchSize;
  return p.tokens <= INT32_MAX - kMidTokens && 2 * p.outputs() < INT32_MAX - 16;
}

// Why the Hopper kernels do not take it.
inline Unsupported hopper_linear_unsupported(const LinearParams& p, const Gpu& gpu) {
  if (const Unsupported device = hopper_unsupported(gpu)) return device;
  if (is_batch_linear(p) && gpu.major != 9) return {"the device's compute capability is not 9.0"};
  if (const Unsupported sizes = hopper_sizes_unsupported(p)) return sizes;
  if (p.epilogue == Epilogue::kAddNorm && p.workspace == nullptr) return {"no workspace was given"};
  if (!has_linear_indices(p)) return {kTooLarge};
  return has_linear_vectors(p) ? Unsupported{} : Unsupported{kMisaligned};
}

// Addresses are looked at for their alignment alone: a plan of memory that is not there yet has
// null pointers.
inline KernelChoice<LinearKernel> plan_linear(const LinearParams& p, const Gpu& gpu) {
  if (p.backend == Backend::kPortable) return {LinearKernel::kTile};
  if (const Unsupported why = hopper_linear_unsupported(p, gpu)) return {LinearKernel::kTile, why};
  const bool is_dense = p.weight.format == WeightFormat::kDense;
  if (p.x_scales != nullptr) return {LinearKernel::kBatchFp8};
  if (is_batch_linear(p)) return {is_dense ? LinearKernel::kBatch : LinearKernel::kBatchStored};
  const bool has_workspace = p.workspace != nullptr && is_vector_aligned(p.workspace);
  if (!is_dense) {
    if (p.tokens <= kStoredTokens) return {LinearKernel::kNarrow};
    if (has_workspace)
      return {LinearKernel::kMidStored,
              {p.tokens > kMidStoredTokens ? "in groups of 64 tokens" : nullptr}};
    return {LinearKernel::kNarrow, {"in groups of 16 tokens, for want of a workspace"}};
  }
  if (p.tokens <= kMidTokens) return {kernel_of_group(p.tokens)};
  if (p.epilogue == Epilogue::kAdd || has_workspace) return {LinearKernel::kLarge};
  return {LinearKernel::kMid, {"in groups of 64 tokens, for want of a workspace"}};
}

}  // namespace photon
