// The weight of an op, as all of them are given one.
#pragma once
#include "common/linear.h"
#include "ops/checks.h"

namespace photon::ops {

// What a call gives of a weight besides its numbers.
struct WeightTensors {
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& scale;
};

struct WeightArg {
  Arg rows;
  OptionalArg bias;
  OptionalArg scale;

  explicit WeightArg(const Arg& checked) : rows(checked) {}

  // `checked`: [n, k], of x's dtype or fp8. `meaning`: of the bias's shape, which is [n].
  WeightArg(Args& arg, const Arg& x, const Arg& checked, const WeightTensors& others,
            const char* meaning)
      : rows(checked), bias(arg("bias", others.bias)), scale(arg("weight_scale", others.scale)) {
    if (bias) bias->dtype_of(x).shape({rows.size(0)}, meaning).contiguous();
    check_scale();
  }

  Weight weight() const {
    Weight w = dense_weight(rows.data<void>(), rows.size(0), rows.size(1), rows.stride(0));
    if (!scale) return w;
    w.format = WeightFormat::kFp8;
    w.scales = {scale->data<float>(), scale->size(1), scale->size(0) == w.n ? 1 : kScaleBlock,
                scale->size(1) == 1 ? w.k : kScaleBlock};
    return w;
  }

 private:
  static constexpr const char* kShapes =
      "[n, 1], [n, ceil(k / 128)] or [ceil(n / 128), ceil(k / 128)] of the weight";

  void check_scale() const {
    if (scale.get() == nullptr) {
      if (rows.is_fp8())
        fail(rows.op(), "weight_scale is None, expected float32 ", kShapes, ", because ",
             rows.name(), " has dtype float8_e4m3fn");
      return;
    }
    if (!rows.is_fp8())
      fail(rows.op(), "weight_scale is a tensor, expected None, because ", rows.name(),
           " does not have dtype float8_e4m3fn");
    scale->float32().rank(2, kShapes);
    const auto blocks = [](int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; };
    const bool of_rows = scale->size(0) == rows.size(0);
    if (of_rows && scale->size(1) == 1) {
      scale->contiguous();
    } else {
      scale->shape({of_rows ? rows.size(0) : blocks(rows.size(0)), blocks(rows.size(1))}, kShapes)
          .contiguous();
    }
  }
};

}  // namespace photon::ops
