// embedding and select_tokens: copies of rows, or numbers read from a table of few bits.
#include <cstring>

#include "common/embedding.h"
#include "common/segment.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kCopyGrainBytes = 256 * 1024;  // less is not worth waking a helper for

// out[i] = source(i), or zeros where source returns null.
template <typename Source>
void copy_tokens(void* out, int64_t tokens, int64_t token_bytes, int64_t out_stride_bytes,
                 const Source& source) {
  if (token_bytes == 0) return;  // an empty tensor has no address to copy to
  const int64_t grain = 1 + kCopyGrainBytes / token_bytes;
  parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* to = static_cast<char*>(out) + i * out_stride_bytes;
      const char* from = source(i);
      if (from == nullptr) {
        std::memset(to, 0, static_cast<size_t>(token_bytes));
      } else {
        std::memcpy(to, from, static_cast<size_t>(token_bytes));
      }
    }
  });
}

}  // namespace

void embedding(const EmbeddingParams& p) {
  const int64_t size = size_of(p.dtype);
  const bool is_dense = p.weight.format == WeightFormat::kDense;
  copy_tokens(p.out, p.num_tokens, p.weight.k * size, p.out_stride * size,
              [&](int64_t i) { return is_dense ? embedding_of(p, i) : own_embedding(p, i); });
  if (is_dense) return;
  const SimdKernels& kernels = simd();
  parallel_for(p.num_tokens, 1 + kCopyGrainBytes / (p.weight.k * size + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = embedding_row(p, i);
                   if (row < 0) continue;
                   char* const out = static_cast<char*>(p.out) + i * p.out_stride * size;
                   kernels.read_row(p.weight, row, out, p.dtype);
                 }
               });
}

void select_tokens(const SelectTokensParams& p) {
  const int64_t size = size_of(p.dtype);
  copy_tokens(
      p.out, p.num_segments, p.hidden * size, p.out_stride * size, [&](int64_t r) -> const char* {
        const int64_t last = last_token(load_segment(p.segments, r), p.num_tokens);
        return last < 0 ? nullptr : static_cast<const char*>(p.x) + last * p.x_stride * size;
      });
}

}  // namespace photon::cpu
