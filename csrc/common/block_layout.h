// What the rows of each weight format are made of.
#pragma once
#include "host_device.h"
#include "weight.h"

namespace photon {

constexpr int kWeightFormats = 14;

constexpr const char* kFormatNames[kWeightFormats] = {"dense", "fp8",  "int4", "int8", "mxfp4",
                                                      "nvfp4", "q4_0", "q4_1", "q5_0", "q5_1",
                                                      "q8_0",  "q4_k", "q5_k", "q6_k"};

constexpr const char* name_of(WeightFormat format) {
  return kFormatNames[static_cast<int>(format)];
}

// Of e2m1 numbers, whose scales are bytes.
PHOTON_HOST_DEVICE constexpr bool is_fp4(WeightFormat format) {
  return format == WeightFormat::kMxFp4 || format == WeightFormat::kNvFp4;
}

// Codes of columns that share a scale of floating point.
constexpr bool is_int(WeightFormat format) {
  return format == WeightFormat::kInt4 || format == WeightFormat::kInt8;
}

// What a row of k columns is made of: k / columns blocks, of so many bytes.
struct BlockLayout {
  int64_t columns, bytes;
};

// Of any format but kDense.
PHOTON_HOST_DEVICE constexpr BlockLayout block_layout(WeightFormat format) {
  switch (format) {
    case WeightFormat::kDense:
    case WeightFormat::kFp8:
      return {1, 1};
    case WeightFormat::kInt4:
    case WeightFormat::kMxFp4:
      return {32, 16};
    case WeightFormat::kNvFp4:
      return {16, 8};
    case WeightFormat::kInt8:
      return {16, 16};
    case WeightFormat::kQ4_0:
      return {32, 18};
    case WeightFormat::kQ4_1:
      return {32, 20};
    case WeightFormat::kQ5_0:
      return {32, 22};
    case WeightFormat::kQ5_1:
      return {32, 24};
    case WeightFormat::kQ8_0:
      return {32, 34};
    case WeightFormat::kQ4K:
      return {256, 144};
    case WeightFormat::kQ5K:
      return {256, 176};
    case WeightFormat::kQ6K:
      return {256, 210};
  }
  return {};
}

}  // namespace photon
