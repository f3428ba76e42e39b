// Index maths that CPU and CUDA kernels share is written once, in this directory, and compiled by
// both compilers. Sources in cpu/simd must not include such functions: they are compiled once per
// instruction set, and of an inline function the linker keeps any one copy, perhaps one that an
// older machine cannot run.
#pragma once

#ifdef __CUDACC__
#define PHOTON_HOST_DEVICE __host__ __device__
#else
#define PHOTON_HOST_DEVICE
#endif
