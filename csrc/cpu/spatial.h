// The CPU kernels of spatial answers; see cpu/kernels.h.
#pragma once
#include "common/spatial.h"

namespace photon::cpu {

void spatial_features(const SpatialFeaturesParams& p);
void choose_value(const ChooseValueParams& p);

}  // namespace photon::cpu
