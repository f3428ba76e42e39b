// A weight as kernels read it. Types alone: the loops for several instruction sets include this.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace photon {

// How the numbers of a weight lie in memory. From kQ4_0 on: the blocks of a GGUF file, each with
// its scales (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
enum class WeightFormat : int32_t {
  kDense,  // rows of k elements, of the activations' dtype
  kFp8,  // rows of k e4m3 bytes (1 sign, 4 exponent and 3 mantissa bits, bias 7; no infinity), with
         // scales. A NaN (0x7f, 0xff) is read as 480, or as NaN: whoever loads weights looks for it
  kInt4,   // rows of k / 2 bytes, with scales: the low four bits are the even column, and a number
           // is (bits - zero) * scale, with zero = 8 where there are no zeros; where there are
           // offsets, of 16 bits as the scales are, bits * scale + offset
  kInt8,   // rows of k bytes, with scales: a number is (bits - 128) * scale
  kMxFp4,  // rows of k / 2 bytes as kInt4, of e2m1 numbers (1 sign, 2 exponent and 1 mantissa bits,
           // bias 1; neither infinity nor NaN), and a scale for 32 columns: an e8m0 byte, which is
           // 2^(byte - 127). 255, which is NaN, is read as infinity
  kNvFp4,  // the same with a scale for 16 columns: an e4m3 byte, read as in kFp8
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4K,
  kQ5K,
  kQ6K,
};

constexpr int64_t kScaleBlock = 128;  // rows, and columns, of a block of fp8 with one scale

// What the numbers of formats before kQ4_0 are multiplied by. That of row r and column c is
// data[r / rows * stride + c / columns], and so are its zero and its offset.
struct WeightScales {
  const void* data;      // null: there are none
  const uint8_t* zeros;  // of kInt4, or null
  const void* offsets;   // of kInt4, or null: of dtype
  int64_t stride, rows, columns;
  DType dtype;            // of kFp8: float32; of kMxFp4 and kNvFp4 it means nothing
  const float* divisors;  // of kMxFp4 and kNvFp4, or null: scales of row r are divided by
                          // divisors[r] before all else
};

// A matrix [n, k] that a step only reads. A number is rounded to float32 once (where its scale is
// divided, that was before), and then multiplied.
struct Weight {
  const void* data;
  int64_t n, k, stride;  // stride: from row to row, in elements of a dense weight, else in bytes
  WeightFormat format;
  WeightScales scales;
};

// out [n, k] = the numbers of a weight that is not dense, rounded to dtype.
struct DequantizeParams {
  void* out;
  Weight weight;
  int64_t out_stride;
  DType dtype;
};

}  // namespace photon
