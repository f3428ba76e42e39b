// The launchers of spatial answers; see cuda/kernels.h.
#pragma once
#include "common/spatial.h"

namespace photon::cuda {

int spatial_features(const SpatialFeaturesParams& p, void* stream);
int choose_value(const ChooseValueParams& p, void* stream);

}  // namespace photon::cuda
