// The log-probabilities that a row asks for: of its logits as they come, or processed: of what is
// sampled of them (penalties.h), scaled as the row asks.
#pragma once
#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "out_record.h"
#include "params.h"
#include "segment.h"

namespace photon {

struct Logprobs {
  int32_t* out;  // [1 + 2 * top]; null: none are asked for
  int32_t top;
  bool processed;

  PHOTON_HOST_DEVICE void put(int32_t column, float value) const {
    memcpy(out + column, &value, sizeof(value));
  }
  PHOTON_HOST_DEVICE void put_top(int32_t place, int32_t id, float value) const {
    out[kLogprobTop + 2 * place] = id;
    put(kLogprobTop + 2 * place + 1, value);
  }
};

// Of a segment that is sampled.
PHOTON_HOST_DEVICE inline Logprobs load_logprobs(const SampleParams& p, int64_t r,
                                                 const Segment& s) {
  const int32_t asked = row_words(p.row_state, s.row)[kRowLogprobs];
  if (p.logprobs == nullptr || asked == 0) return {nullptr, 0, false};
  const int32_t count = asked > 0 ? asked - 1 : -(asked + 1);
  const int64_t room = (p.logprobs_width - kLogprobTop) / 2;
  const int64_t most = room < kMostLogprobs ? room : kMostLogprobs;
  const int32_t top = static_cast<int32_t>(count < most ? count : most);
  return {p.logprobs + r * p.logprobs_width, top, asked < 0};
}

}  // namespace photon
