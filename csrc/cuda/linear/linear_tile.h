// The portable kernel of every linear; of a dense weight, but for the last.
#pragma once
#include "common/linear.h"

namespace photon::cuda {

int run_tile_linear(const LinearParams& p, void* stream);       // Prologue::kNone
int run_tile_norm_linear(const LinearParams& p, void* stream);  // Prologue::kRmsNorm
int run_stored_linear(const LinearParams& p, void* stream);     // of one that is not

}  // namespace photon::cuda
