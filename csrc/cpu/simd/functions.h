// What each ISA defines; table.cpp gathers the pointers.
#pragma once
#include "cpu/simd/lanes.h"
#include "cpu/simd/simd.h"

namespace photon::cpu::PHOTON_ISA {

void to_float(float* to, const void* from, int64_t n, DType dtype);
void linear(const LinearBlock& block);
void read_row(const Weight& weight, int64_t row, void* out, DType dtype);
void rms_norm(const NormToken& token);
void add(void* to, const void* x, int64_t n, DType dtype);
void silu_mul(void* out, const void* gate, const void* up, int64_t n, DType dtype);
void rotate(const RotateHead& head);
void attend(const AttendGroup& group);
Candidate argmax(const void* values, int64_t n, DType dtype);

}  // namespace photon::cpu::PHOTON_ISA
