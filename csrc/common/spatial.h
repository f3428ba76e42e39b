// Spatial answers: x, y and size of objects stand where text has tokens. The ids behind the
// vocabulary are these values: `bins` coordinates, then bins * bins sizes, width * bins + height.
#pragma once
#include <cmath>
#include <cstdint>

#include "decode_meta.h"
#include "dtype.h"
#include "params.h"
#include "segment.h"

namespace photon {

enum ObjectValue : int32_t { kValueX = 0, kValueY = 1, kValueSize = 2, kMostObjectValues = 3 };

// Fourier features of each token that is a value; zeros for the others.
struct SpatialFeaturesParams {
  void* out;  // [tokens, width]: cosines and sines of a coordinate, cosines and sines of a size, 1
              // for a coordinate, 1 for a size, zeros
  const int32_t* decode_meta;  // [tokens, 4]
  const float* coordinate;     // [coordinates]: turns of the angle from 0 to 1
  const float* size;           // [2, sizes]: those of width and height, which are added
  int64_t tokens, width, coordinates, sizes, vocab, bins, out_stride;
  DType dtype;
};

// The likeliest value in the place of what was sampled.
struct ChooseValueParams {
  int32_t* sampled;          // [num_segments]
  const void* logits;        // [num_segments, 3 * bins]: of coordinates, widths and heights
  const int32_t* segments;   // [num_segments, 4]
  const int32_t* row_state;  // [rows, kRowColumns]
  RowWords stop_ids;
  int64_t rows, num_segments, vocab, bins, logits_stride;
  DType dtype;
};

// From 0.001 to 1, by equal factors.
PHOTON_HOST_DEVICE inline float side_of_bin(int64_t bin, int64_t bins) {
  return exp2f(10.0f * static_cast<float>(bin) / static_cast<float>(bins - 1) - 10.0f);
}

// What a token's value is as numbers.
struct SpatialValue {
  bool is_coordinate, is_size;
  float a, b;  // the coordinate; width and height
};

PHOTON_HOST_DEVICE inline SpatialValue spatial_value(const SpatialFeaturesParams& p,
                                                     int64_t token) {
  const int32_t* meta = p.decode_meta + token * kMetaColumns;
  const int64_t value = meta[kMetaLength] > 0 ? meta[kMetaToken] - p.vocab : -1;
  if (value < 0 || value >= p.bins + p.bins * p.bins) return {false, false, 0.0f, 0.0f};
  if (value < p.bins)
    return {true, false, static_cast<float>(value) / static_cast<float>(p.bins), 0.0f};
  const int64_t size = value - p.bins;
  return {false, true, side_of_bin(size / p.bins, p.bins), side_of_bin(size % p.bins, p.bins)};
}

PHOTON_HOST_DEVICE inline float wave(float turns, bool is_sine) {
  const float angle = 6.28318530717958647692f * turns;
  return is_sine ? sinf(angle) : cosf(angle);
}

PHOTON_HOST_DEVICE inline float spatial_feature(const SpatialFeaturesParams& p,
                                                const SpatialValue& value, int64_t column) {
  const int64_t size_begin = 2 * p.coordinates, ones = size_begin + 2 * p.sizes;
  if (column >= ones)
    return (column == ones && value.is_coordinate) || (column == ones + 1 && value.is_size) ? 1.0f
                                                                                            : 0.0f;
  if (column < size_begin) {
    if (!value.is_coordinate) return 0.0f;
    return wave(value.a * p.coordinate[column % p.coordinates], column >= p.coordinates);
  }
  if (!value.is_size) return 0.0f;
  const int64_t place = (column - size_begin) % p.sizes;
  return wave(value.a * p.size[place] + value.b * p.size[p.sizes + place],
              column - size_begin >= p.sizes);
}

// Which of its object's values the segment's row gets next, by how long its answer is; -1: none,
// because its answer is text, nothing was sampled, or a stop id where the next object would begin.
PHOTON_HOST_DEVICE inline int32_t next_value(const ChooseValueParams& p, int64_t r) {
  const Segment s = load_segment(p.segments, r);
  const int32_t token = p.sampled[r];
  if (!is_sampled(s, p.row_state, p.rows) || token < 0) return -1;
  const int32_t* row = row_words(p.row_state, s.row);
  const int32_t count = row[kRowObjectValues];
  const int64_t made = int64_t{last_position(s, p.row_state)} + 1 - row[kRowAnswerBegin];
  if (count < 1 || count > kMostObjectValues || made < 0) return -1;
  const int32_t place = static_cast<int32_t>(made % count);
  if (place > 0) return place;
  const int64_t stops = valid_entries(row[kRowStopCount], p.stop_ids);
  for (int64_t i = 0; i < stops; ++i)
    if (row_words(p.stop_ids, s.row)[i] == token) return -1;
  return place;
}

// The id of a value by its likeliest bins; a coordinate uses only the first. -1: a bin is invalid.
PHOTON_HOST_DEVICE inline int32_t value_id(const ChooseValueParams& p, int32_t place, int32_t a,
                                           int32_t b) {
  if (a < 0 || b < 0) return -1;
  const int64_t value = place == kValueSize ? p.bins + a * p.bins + b : a;
  return static_cast<int32_t>(p.vocab + value);
}

}  // namespace photon
