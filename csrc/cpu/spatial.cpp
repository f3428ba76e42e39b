// spatial_features and choose_value: a few values of few rows; no threads but for the features.
#include "cpu/spatial.h"

#include "cpu/parallel.h"
#include "cpu/rounding.h"
#include "cpu/scratch.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kGrain = 64;  // tokens; most are no values, and cost a fill with zeros

}  // namespace

void spatial_features(const SpatialFeaturesParams& p) {
  const int64_t token_bytes = p.out_stride * size_of(p.dtype);
  parallel_for(p.tokens, kGrain, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    float* const features = scratch.floats(p.width);
    for (int64_t i = begin; i < end; ++i) {
      const SpatialValue value = spatial_value(p, i);
      for (int64_t column = 0; column < p.width; ++column)
        features[column] = spatial_feature(p, value, column);
      round_to(static_cast<char*>(p.out) + i * token_bytes, features, p.width, p.dtype);
    }
  });
}

void choose_value(const ChooseValueParams& p) {
  const int64_t size = size_of(p.dtype);
  for (int64_t r = 0; r < p.num_segments; ++r) {
    const int32_t place = next_value(p, r);
    if (place < 0) continue;
    const char* const logits = static_cast<const char*>(p.logits) + r * p.logits_stride * size;
    const auto likeliest = [&](int64_t part) {
      return simd().argmax(logits + part * p.bins * size, p.bins, p.dtype).id;
    };
    p.sampled[r] = place == kValueSize ? value_id(p, place, likeliest(1), likeliest(2))
                                       : value_id(p, place, likeliest(0), 0);
  }
}

}  // namespace photon::cpu
