// A weight as kernels read it. Types alone: the loops for several instruction sets include this.
#pragma once
#include <cstdint>

namespace photon {

// How the numbers of a weight lie in memory.
enum class WeightFormat : int32_t {
  kDense,  // rows of k elements, of the activations' dtype
  kFp8,  // rows of k e4m3 bytes (1 sign, 4 exponent and 3 mantissa bits, bias 7; no infinity), with
         // scales. A NaN (0x7f, 0xff) is read as 480: whoever loads weights looks for it
};

constexpr int64_t kScaleBlock = 128;  // rows, and columns, of a block with one scale

// What numbers that are stored in fewer bits are multiplied by. That of row r and column c is
// data[r / rows * stride + c / columns].
struct WeightScales {
  const float* data;              // null: there are none
  int64_t stride, rows, columns;  // rows: 1 or kScaleBlock; columns: k or kScaleBlock
};

// A matrix [n, k] that a step only reads.
struct Weight {
  const void* data;
  int64_t n, k, stride;  // stride: from row to row, in elements
  WeightFormat format;
  WeightScales scales;
};

}  // namespace photon
