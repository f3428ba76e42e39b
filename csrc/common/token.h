// Tokens of decode_meta, read and written.
#pragma once
#include <climits>
#include <cstdint>

#include "decode_meta.h"
#include "host_device.h"

namespace photon {

struct Token {
  int32_t position, length, row;
};

PHOTON_HOST_DEVICE inline Token load_token(const int32_t* decode_meta, int64_t index) {
  const int32_t* meta = decode_meta + index * kMetaColumns;
  return {meta[kMetaPosition], meta[kMetaLength], meta[kMetaRow]};
}

// In a mixed step the device's counts say which tokens are decode tokens: the leading ones.
// Attention of decode tokens leaves the others alone, attention of chunks leaves these alone.
// Without counts an op has all tokens of its step.
PHOTON_HOST_DEVICE inline bool is_decode_token(const int32_t* counts, int64_t index) {
  return counts == nullptr || index < counts[kCountDecodeTokens];
}

PHOTON_HOST_DEVICE inline bool is_chunk_token(const int32_t* counts, int64_t index) {
  return counts == nullptr || index >= counts[kCountDecodeTokens];
}

// A live token can stand here: position and length fit int32.
PHOTON_HOST_DEVICE inline bool is_position(int64_t position) {
  return position >= 0 && position < INT32_MAX;
}

PHOTON_HOST_DEVICE inline void set_token(int32_t* decode_meta, int64_t index, int32_t token,
                                         int32_t position, int32_t row) {
  int32_t* meta = decode_meta + index * kMetaColumns;
  meta[kMetaToken] = token;
  meta[kMetaPosition] = position;
  meta[kMetaLength] = position + 1;
  meta[kMetaRow] = row;
}

PHOTON_HOST_DEVICE inline void clear_token(int32_t* decode_meta, int64_t index) {
  for (int64_t i = index * kMetaColumns; i < (index + 1) * kMetaColumns; ++i) decode_meta[i] = 0;
}

}  // namespace photon
