// The weight of an op, as all of them are given one.
#pragma once
#include "common/linear.h"
#include "ops/checks.h"

namespace photon::ops {

struct WeightArg {
  Arg rows;
  OptionalArg bias;

  explicit WeightArg(const Arg& checked) : rows(checked) {}

  // `checked`: [n, k], of x's dtype. `meaning`: of the bias's shape, which is [n].
  WeightArg(Args& arg, const Arg& x, const Arg& checked, const std::optional<Tensor>& bias_,
            const char* meaning)
      : rows(checked), bias(arg("bias", bias_)) {
    if (bias) bias->dtype_of(x).shape({rows.size(0)}, meaning).contiguous();
  }

  Weight weight() const {
    return {rows.data<void>(), rows.size(0), rows.size(1), rows.stride(0), WeightFormat::kDense};
  }
};

}  // namespace photon::ops
