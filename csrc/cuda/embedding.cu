// Rows gathered by index: embedding and select_tokens.
#include "common/segment.h"
#include "common/token.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 128;

// Which source row the output row i copies; -1: none, it becomes zeros.
struct TokenOfToken {
  const int32_t* decode_meta;
  int64_t vocab;

  __device__ int64_t operator()(int64_t i) const { return embedded_token(decode_meta, i, vocab); }
};

struct LastTokenOfSegment {
  const int32_t* segments;
  int64_t num_tokens;

  __device__ int64_t operator()(int64_t i) const {
    return last_token(load_segment(segments, i), num_tokens);
  }
};

// Width and strides are in words.
struct Gather {
  void* out;
  const void* source;
  int64_t width, out_stride, source_stride;
};

// The kernels before have ended when it lets the next one start: what that reads ahead may be what
// they write.
template <typename Word, typename Index>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const Gather g, const Index index) {
  wait_for_earlier();
  let_next_start();
  const int64_t row = index(blockIdx.x);
  Word* out = static_cast<Word*>(g.out) + blockIdx.x * g.out_stride;
  const Word* source = static_cast<const Word*>(g.source) + (row < 0 ? 0 : row * g.source_stride);
  for (int64_t i = threadIdx.x; i < g.width; i += kThreads) out[i] = row < 0 ? Word{} : source[i];
}

template <typename Word, typename Index>
int gather_words(Gather g, const Index& index, int64_t rows, int64_t element_bytes, void* stream) {
  const auto words = [&](int64_t elements) {
    return elements * element_bytes / static_cast<int64_t>(sizeof(Word));
  };
  g = {g.out, g.source, words(g.width), words(g.out_stride), words(g.source_stride)};
  return launch(gather_rows_kernel<Word, Index>, waiting_shape(rows, kThreads), stream, g, index);
}

// Width and strides are in elements. A copy is bit for bit, so the word is chosen by alignment
// alone.
template <typename Index>
int gather_rows(const Gather& g, const Index& index, int64_t rows, DType dtype, void* stream) {
  if (rows == 0 || g.width == 0) return 0;
  const bool vectors = is_vector_aligned(g.out) && is_vector_aligned(g.source) &&
                       are_whole_vectors(dtype, g.width, g.out_stride, g.source_stride);
  if (vectors) return gather_words<uint4>(g, index, rows, size_of(dtype), stream);
  if (dtype == DType::kF32) return gather_words<uint32_t>(g, index, rows, size_of(dtype), stream);
  return gather_words<uint16_t>(g, index, rows, size_of(dtype), stream);
}

}  // namespace

int embedding(const EmbeddingParams& p, void* stream) {
  const Gather g = {p.out, p.weight, p.hidden, p.out_stride, p.hidden};
  return gather_rows(g, TokenOfToken{p.decode_meta, p.vocab}, p.num_tokens, p.dtype, stream);
}

int select_tokens(const SelectTokensParams& p, void* stream) {
  const Gather g = {p.out, p.x, p.hidden, p.out_stride, p.x_stride};
  return gather_rows(g, LastTokenOfSegment{p.segments, p.num_tokens}, p.num_segments, p.dtype,
                     stream);
}

}  // namespace photon::cuda
