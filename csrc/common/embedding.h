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

// The row of the table, or of the embeddings, that a token is; null: the token is dead, or its id
// is of neither.
PHOTON_HOST_DEVICE inline const char* embedding_of(const EmbeddingParams& p, int64_t token_index) {
  const int32_t* meta = p.decode_meta + token_index * kMetaColumns;
  if (meta[kMetaLength] <= 0) return nullptr;
  const int64_t token = meta[kMetaToken], size = size_of(p.dtype);
  const int64_t embed = kFirstEmbed - token;
  if (token >= 0 && token < p.weight.n)
    return static_cast<const char*>(p.weight.data) + token * p.weight.stride * size;
  if (embed >= 0 && embed < p.num_embeds)
    return static_cast<const char*>(p.embeds) + embed * p.weight.k * size;
  return nullptr;
}

}  // namespace photon
