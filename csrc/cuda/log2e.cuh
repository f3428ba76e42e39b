// The softmax of the Hopper attentions is in powers of two: exp(x) = exp2(x * kLog2E).
#pragma once

namespace photon::cuda {

constexpr float kLog2E = 1.44269504f;

}  // namespace photon::cuda
