// The portable kernel of every linear.
#pragma once
#include "common/linear.h"

namespace photon::cuda {

int run_tile_linear(const LinearParams& p, void* stream);       // Prologue::kNone
int run_tile_norm_linear(const LinearParams& p, void* stream);  // Prologue::kRmsNorm

}  // namespace photon::cuda
