// Where the embedding of a token lies.
#pragma once
#include <cstdint>

#include "decode_meta.h"
#include "dtype.h"
#include "host_device.h"
#include "params.h"

namespace photon {

// Ids from 0 on are of the vocabulary; kFirstEmbed and those below it count the embeddings that
// prompts bring along.
constexpr int64_t kFirstEmbed = -2;

// The row of the table, or of the embeddings, that a token is; null: the token is dead, or its id
// is of neither.
PHOTON_HOST_DEVICE inline const char* embedding_of(const EmbeddingParams& p, int64_t token_index) {
  const int32_t* meta = p.decode_meta + token_index * kMetaColumns;
  if (meta[kMetaLength] <= 0) return nullptr;
  const int64_t token = meta[kMetaToken], row_bytes = p.hidden * size_of(p.dtype);
  const int64_t embed = kFirstEmbed - token;
  if (token >= 0 && token < p.vocab) return static_cast<const char*>(p.weight) + token * row_bytes;
  if (embed >= 0 && embed < p.num_embeds)
    return static_cast<const char*>(p.embeds) + embed * row_bytes;
  return nullptr;
}

}  // namespace photon
