// Element types the kernels know. Integers in params structs and torch's scalar types are
// translated at the edge (csrc/ops).
#pragma once
#include <cstdint>

#include "host_device.h"

namespace photon {

enum class DType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

PHOTON_HOST_DEVICE constexpr int64_t size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace photon
