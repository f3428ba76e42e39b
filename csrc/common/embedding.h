// Where the embedding of a token lies.
#pragma once
#include <cstdint>

#include "decode_meta.h"
#include "dtype.h"
#include "host_device.h"
#include "linear.h"

namespace photon {

// Ids from 0 on are of the vocabulary; kFirstEmbed and those below it count the embeddings that
// prompts bring along.
constexpr int64_t kFirstEmbed = -2;

struct EmbeddingParams {
  void* out;  // [num_tokens, hidden]; zeros for dead tokens and for ids of neither source
  const int32_t* decode_meta;  // [num_tokens, 4]
  Weight weight;               // [vocab, hidden]: of token ids from 0 on
  const void* embeds;          // [num_embeds, hidden]: of id -2 - i the i-th; null: there are none
  int64_t num_tokens, num_embeds, out_stride;
  DType dtype;
};

// The row of the table that a token is; below 0: none.
PHOTON_HOST_DEVICE inline int64_t embedding_row(const EmbeddingParams& p, int64_t token_index) {
  const int32_t* meta = p.decode_meta + token_index * kMetaColumns;
  const int64_t token = meta[kMetaToken];
  return meta[kMetaLength] > 0 && token < p.weight.n ? token : -1;
}

// The embedding that a token brings along; null: none.
PHOTON_HOST_DEVICE inline const char* own_embedding(const EmbeddingParams& p, int64_t token_index) {
  const int32_t* meta = p.decode_meta + token_index * kMetaColumns;
  const int64_t embed = kFirstEmbed - meta[kMetaToken];
  if (meta[kMetaLength] <= 0 || embed < 0 || embed >= p.num_embeds) return nullptr;
  return static_cast<const char*>(p.embeds) + embed * p.weight.k * size_of(p.dtype);
}

// Where the embedding of a token lies, of a dense table; null: the token is dead, or its id is of
// neither.
PHOTON_HOST_DEVICE inline const char* embedding_of(const EmbeddingParams& p, int64_t token_index) {
  const int64_t row = embedding_row(p, token_index);
  if (row < 0) return own_embedding(p, token_index);
  return static_cast<const char*>(p.weight.data) + row * p.weight.stride * size_of(p.dtype);
}

}  // namespace photon
