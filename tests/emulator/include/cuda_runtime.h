// Stands in for the CUDA toolkit's header: device side and host side.
#pragma once
#include <cmath>

#include "cuda_runtime_api.h"
#include "emulator/keywords.h"
#include "emulator/launch.h"
#include "emulator/math.h"
#include "emulator/warp.h"
