// The weight of an op, as all of them are given one.
#pragma once
#include "common/linear.h"
#include "ops/checks.h"

namespace photon::ops {

// What a call gives of a weight besides its numbers. `format`: of WeightFormat; kDense: what the
// dtype of the numbers says.
struct WeightTensors {
  const std::optional<Tensor>& scale;
  int64_t format;
  const std::optional<Tensor>& zero;
  const std::optional<Tensor>& divisor;
};

// A matrix [n, k]: of the dtype of what it is multiplied with, or stored in fewer bits.
class WeightArg {
 public:
  Arg rows;
  OptionalArg scale, zero, divisor;

  // A dense one, which is checked.
  explicit WeightArg(const Arg& checked) : rows(checked), k_(checked.size(1)) {}

  // Checks all of it. `like`: its dtype is that of a dense one. `n`: or Arg::kAny. `meaning`: of
  // the shape [n, k].
  WeightArg(Args& arg, const Arg& given, const WeightTensors& others, const Arg& like, int64_t n,
            int64_t k, const char* meaning);

  Weight weight() const;

 private:
  void check_fp8_scale() const;
  void check_int_scale() const;
  void check_fp4_scale() const;

  int64_t k_;
  WeightFormat format_ = WeightFormat::kDense;
};

}  // namespace photon::ops
