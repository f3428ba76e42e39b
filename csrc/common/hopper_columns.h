// Which widths of x the Hopper linears take. photon_ext/models/kernel_plan.py, by which a decoder
// chooses between ops, has the same numbers.
#pragma once
#include <cstdint>

namespace photon {

constexpr int64_t kHopperColumns = 64;           // columns come in multiples of this
constexpr int64_t kMaxNormColumns = 16384;       // where x is normalized: the norm's weight lies in
                                                 // shared memory
constexpr int64_t kMaxColumns = INT32_MAX / 16;  // elsewhere: offsets in bytes are of 32 bits

// Why not so many; null: they do. `normalizes`: in norm_linear and norm_swiglu.
inline const char* hopper_columns_misfit(int64_t columns, bool normalizes) {
  if (columns <= 0 || columns % kHopperColumns != 0)
    return "the number of columns is no multiple of 64";
  if (normalizes && columns > kMaxNormColumns)
    return "there are more than 16384 columns to normalize";
  return columns <= kMaxColumns ? nullptr : "there are more columns than 32 bits index";
}

// Words (float32) of the workspace of a linear that normalizes many tokens: of each k values of
// bfloat16 and a scale.
constexpr int64_t linear_workspace_words(int64_t tokens, int64_t k) {
  return tokens * ((k + 1) / 2 + 1);
}

// The same of a linear whose output is normalized: sums of up to four parts of the columns.
constexpr int64_t linear_norm_workspace_words(int64_t tokens, int64_t n) { return 4 * tokens * n; }

}  // namespace photon
