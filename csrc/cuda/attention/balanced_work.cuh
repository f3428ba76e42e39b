// What a CTA of balanced_attention does behind its first partial tile.
#pragma once
#include <type_traits>

#include "cuda/attention/balanced_items.cuh"
#include "cuda/attention/balanced_ranges.cuh"

namespace photon::cuda {

template <typename Plan>
using CtaWork = std::conditional_t<Plan::kIsExact, Items, CtaRange>;

}  // namespace photon::cuda
