// The runs of words that the host packs into a step's deltas, with every index checked.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "row_state.h"

namespace photon {

// How many runs there are; a count that the buffer has no room for is cut.
PHOTON_HOST_DEVICE inline int64_t num_delta_runs(const BeginStepParams& p) {
  if (p.delta_words < 1) return 0;
  const int64_t room = (p.delta_words - kDeltaHeader) / kDeltaRunWords;
  return p.deltas[0] < room ? p.deltas[0] : room;
}

struct DeltaRun {
  int32_t* to;
  const int32_t* from;  // null: zeros
  int64_t count;        // 0 for a run that would leave its table or the buffer

  PHOTON_HOST_DEVICE int32_t word(int64_t i) const { return from != nullptr ? from[i] : 0; }
};

PHOTON_HOST_DEVICE inline DeltaRun delta_run(const BeginStepParams& p, int64_t index) {
  const int32_t* run = p.deltas + kDeltaHeader + index * kDeltaRunWords;
  const int64_t offset = run[1], count = run[2], payload = run[3];
  if (run[0] < 0 || run[0] >= p.num_tables) return {nullptr, nullptr, 0};
  const Table& table = p.tables[run[0]];
  const bool zeros = payload == kDeltaZeros;
  const bool fits = offset >= 0 && count >= 0 && offset + count <= table.size &&
                    (zeros || (payload >= 0 && payload + count <= p.delta_words));
  if (!fits) return {nullptr, nullptr, 0};
  if (zeros) return {table.words + offset, nullptr, count};
  return {table.words + offset, p.deltas + payload, count};
}

}  // namespace photon
