// A linear as ops hand it to the backends: y = x W^T + bias, with what comes before and after it in
// a layer. One struct for all of them; common/linear_plan.h says which kernel runs on a GPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "weight.h"

namespace photon {

constexpr Weight dense_weight(const void* data, int64_t n, int64_t k, int64_t stride) {
  return {data, n, k, stride, WeightFormat::kDense, {}};
}

// What happens to x.
enum class Prologue : int32_t {
  kNone,
  kRmsNorm,  // each token is normalized by its root mean square, and multiplied by norm_weight [k]
};

// What becomes of y.
enum class Epilogue : int32_t {
  kStore,    // out = y
  kAdd,      // residual += y, which is rounded before it is added
  kSwiglu,   // out = silu(gate) * up: the first half of the weight's rows is gate, the second up
  kAddNorm,  // as kAdd, and then out = residual, normalized and multiplied by norm_weight [n]
};

// Which kernels may run. Those of Hopper sum in an order of their own; where they do not take a
// call, the portable ones run.
enum class Backend : int32_t { kPortable, kHopper };

struct LinearParams {
  void* out;              // [tokens, outputs()]; kAdd: null
  void* residual;         // [tokens, n]: kAdd, kAddNorm; else null
  float* out_scales;      // [tokens], kAddNorm with x_scales: out is e4m3 bytes, as
                          // QuantizeFp8Params has them; or null
  const void* x;          // [tokens, k], of dtype; with x_scales e4m3 bytes
  const float* x_scales;  // [tokens], which the bytes of a token are multiplied by; or null
  Weight weight;
  const void* bias;         // [n] or null
  const void* norm_weight;  // the prologue's or the epilogue's, or null
  const int32_t* counts;    // [1] or null: only the first *counts tokens are computed, the others
                            // are left as they are
  float* workspace;         // [linear_workspace_words or linear_norm_workspace_words] or null:
                            // Hopper kernels for many tokens; kAddNorm has none without it
  int64_t tokens, out_stride, residual_stride, x_stride;
  float eps;  // of the norm
  Prologue prologue;
  Epilogue epilogue;
  Backend backend;
  bool pdl;  // a Hopper kernel may start while those before it still run, and read its weights and
             // the counts
  DType dtype;

  int64_t outputs() const { return epilogue == Epilogue::kSwiglu ? weight.n / 2 : weight.n; }
};

// Each token of x divided by its own scale, its largest magnitude by kMostE4m3, as e4m3 bytes.
struct QuantizeFp8Params {
  uint8_t* out;           // [tokens, k]
  float* scales;          // [tokens]
  const void* x;          // [tokens, k]
  const int32_t* counts;  // [1] or null: only the first *counts tokens are computed
  int64_t tokens, k, out_stride, x_stride;
  DType dtype;
};

// The op that computes it.
inline const char* linear_op(const LinearParams& p) {
  const bool norms = p.prologue == Prologue::kRmsNorm;
  switch (p.epilogue) {
    case Epilogue::kStore:
      return norms ? "norm_linear_into" : "linear_into";
    case Epilogue::kAdd:
      return "linear_residual_";
    case Epilogue::kSwiglu:
      return norms ? "norm_swiglu_into" : "swiglu_into";
    case Epilogue::kAddNorm:
      return "linear_norm_into";
  }
  return "";
}

}  // namespace photon
