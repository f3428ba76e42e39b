#include "cpu/simd/functions.h"

#define PHOTON_TEXT_OF(name) #name
#define PHOTON_TEXT(name) PHOTON_TEXT_OF(name)

namespace photon::cpu::PHOTON_ISA {

extern const SimdKernels kernels;
const SimdKernels kernels = {PHOTON_TEXT(PHOTON_ISA),
                             to_float,
                             linear,
                             read_row,
                             rms_norm,
                             add,
                             silu_mul,
                             rotate,
                             attend,
                             argmax};

}  // namespace photon::cpu::PHOTON_ISA
