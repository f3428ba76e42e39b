// Rows gathered by index: embedding and select_tokens.
#include "common/embedding.h"
#include "common/segment.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/stored_row.cuh"

namespace photon::cuda {
namespace {

constexpr int kThreads = 128;

// Where the row lies that the output row i copies; null: nowhere, it becomes zeros.
struct EmbeddingOfToken {
  EmbeddingParams p;

  __device__ const void* operator()(int64_t i) const { return embedding_of(p, i); }
};

struct LastTokenOfSegment {
  const void* x;
  const int32_t* segments;
  int64_t num_tokens, stride_bytes;

  __device__ const void* operator()(int64_t i) const {
    const int64_t last = last_token(load_segment(segments, i), num_tokens);
    return last < 0 ? nullptr : static_cast<const char*>(x) + last * stride_bytes;
  }
};

// Width and stride are in words.
struct Gather {
  void* out;
  int64_t width, out_stride;
};

// The kernels before have ended when it lets the next one start: what that reads ahead may be what
// they write.
template <typename Word, typename Source>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const Gather g, const Source source_of) {
  wait_for_earlier();
  let_next_start();
  const Word* source = static_cast<const Word*>(source_of(blockIdx.x));
  Word* out = static_cast<Word*>(g.out) + blockIdx.x * g.out_stride;
  for (int64_t i = threadIdx.x; i < g.width; i += kThreads)
    out[i] = source == nullptr ? Word{} : source[i];
}

template <typename Word, typename Source>
int gather_words(Gather g, const Source& source, int64_t rows, int64_t element_bytes,
                 void* stream) {
  const auto words = [&](int64_t elements) {
    return elements * element_bytes / static_cast<int64_t>(sizeof(Word));
  };
  g = {g.out, words(g.width), words(g.out_stride)};
  return launch(gather_rows_kernel<Word, Source>, waiting_shape(rows, kThreads), stream, g, source);
}

// Width and stride are in elements; `vectors`: every row of the source lies at a whole vector. A
// copy is bit for bit, so the word is chosen by alignment alone.
template <typename Source>
int gather_rows(const Gather& g, const Source& source, bool vectors, int64_t rows, DType dtype,
                void* stream) {
  if (rows == 0 || g.width == 0) return 0;
  vectors = vectors && is_vector_aligned(g.out) && are_whole_vectors(dtype, g.width, g.out_stride);
  if (vectors) return gather_words<uint4>(g, source, rows, size_of(dtype), stream);
  if (dtype == DType::kF32) return gather_words<uint32_t>(g, source, rows, size_of(dtype), stream);
  return gather_words<uint16_t>(g, source, rows, size_of(dtype), stream);
}

// A token's embedding from a table that is not dense, eight numbers a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) read_rows_kernel(const EmbeddingParams p) {
  wait_for_earlier();
  let_next_start();
  T* const out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride;
  const int64_t row = embedding_row(p, blockIdx.x);
  if (row < 0) {
    const T* const own = reinterpret_cast<const T*>(own_embedding(p, blockIdx.x));
    for (int64_t i = threadIdx.x; i < p.weight.k; i += kThreads)
      out[i] = own == nullptr ? from_float<T>(0.0f) : own[i];
    return;
  }
  write_numbers(out, stored_row(p.weight, row), p.weight.k, kThreads);
}

int read_rows(const EmbeddingParams& p, void* stream) {
  if (p.num_tokens == 0 || p.weight.k == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(read_rows_kernel<T>, waiting_shape(p.num_tokens, kThreads), stream, p);
  });
}

}  // namespace

int embedding(const EmbeddingParams& p, void* stream) {
  if (p.weight.format != WeightFormat::kDense) return read_rows(p, stream);
  const Gather g = {p.out, p.weight.k, p.out_stride};
  const bool vectors =
      are_vector_aligned(p.weight.data, p.embeds) && are_whole_vectors(p.dtype, p.weight.stride);
  return gather_rows(g, EmbeddingOfToken{p}, vectors, p.num_tokens, p.dtype, stream);
}

int select_tokens(const SelectTokensParams& p, void* stream) {
  const Gather g = {p.out, p.hidden, p.out_stride};
  const LastTokenOfSegment source = {p.x, p.segments, p.num_tokens, p.x_stride * size_of(p.dtype)};
  const bool vectors = is_vector_aligned(p.x) && are_whole_vectors(p.dtype, p.x_stride);
  return gather_rows(g, source, vectors, p.num_segments, p.dtype, stream);
}

}  // namespace photon::cuda
