// top_k, top_p and min_p of one row, by one thread: common/filter.h says what they keep.
#include "cpu/filter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "common/filter.h"
#include "common/noise.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int kBinBits = 8;

struct Near {
  int32_t id;
  uint32_t distance;
  float logit;
};

// The ids that may be drawn at all, in their order.
void find_near(std::vector<Near>& near, const SampleParams& p, int64_t r, const Noise& noise) {
  thread_local std::vector<float> values;
  values.resize(static_cast<size_t>(p.vocab));
  simd().to_float(values.data(),
                  static_cast<const char*>(p.logits) + r * p.logits_stride * size_of(p.dtype),
                  p.vocab, p.dtype);
  float top = kLowest;
  for (const float value : values) top = value > top ? value : top;
  top = noise.scaled(top);
  near.clear();
  for (int32_t id = 0; id < p.vocab; ++id) {
    const float value = values[static_cast<size_t>(id)];
    if (!(value > kLowest)) continue;
    const uint32_t distance = distance_below(top, noise.scaled(value));
    if (distance != kTooFar) near.push_back({id, distance, value});
  }
}

// The smallest distance up to which the amounts of the ids come to `needed`, found 8 bits at a
// time. All amounts together must come to `needed`.
template <typename Amount>
uint32_t distance_at(const std::vector<Near>& near, uint64_t needed, const Amount& amount) {
  uint32_t prefix = 0;
  for (int shift = 32 - kBinBits; shift >= 0; shift -= kBinBits) {
    std::array<uint64_t, 1 << kBinBits> bins = {};
    for (const Near& n : near) {
      const uint32_t bin = n.distance >> shift;
      if (bin >> kBinBits == prefix) bins[bin % bins.size()] += amount(n.distance);
    }
    size_t bin = 0;
    for (; bins[bin] < needed; ++bin) needed -= bins[bin];
    prefix = prefix << kBinBits | static_cast<uint32_t>(bin);
  }
  return prefix;
}

void keep_up_to(std::vector<Near>& near, uint32_t limit) {
  near.erase(
      std::remove_if(near.begin(), near.end(), [&](const Near& n) { return n.distance > limit; }),
      near.end());
}

void apply(const Filter& filter, std::vector<Near>& near) {
  const auto one = [](uint32_t) { return uint64_t{1}; };
  if (filter.counts() && filter.needed_count() < near.size())
    keep_up_to(near, distance_at(near, filter.needed_count(), one));
  if (filter.sums() && !near.empty()) {
    uint64_t mass = 0;
    for (const Near& n : near) mass += weight_at(n.distance);
    keep_up_to(near, distance_at(near, filter.needed_mass(mass), weight_at));
  }
}

}  // namespace

int32_t filtered_token(const SampleParams& p, int64_t r) {
  thread_local std::vector<Near> near;
  const Segment s = load_segment(p.segments, r);
  const Noise noise = load_noise(s, p.row_state);
  const Filter filter = load_filter(s, p.row_state);
  find_near(near, p, r, noise);
  apply(filter, near);
  Candidate best = {kLowest, -1};
  for (const Near& n : near) {
    if (weight_at(n.distance) < filter.least_weight) continue;
    const float value = noise.noised(noise.scaled(n.logit), n.id);
    if (best.id < 0 || value > best.value) best = {value, n.id};
  }
  return best.id;
}

}  // namespace photon::cpu
