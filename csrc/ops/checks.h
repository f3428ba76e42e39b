// What every op checks about its arguments, once, for CPU, CUDA and Meta. An error names the op,
// the argument, what it has and what was expected: `rms_norm_into: weight has shape [512], expected
// [576] ([hidden of x])`.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "common/dtype.h"
#include "ops/overlap.h"

namespace photon::ops {

using Tensor = torch::stable::Tensor;

struct DeviceId {
  int32_t type = -1;  // aoti_torch_device_type_*()
  int32_t index = -1;
};

std::ostream& operator<<(std::ostream& out, const DeviceId& device);

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// A tensor argument as read from torch: borrowed sizes and strides, dtype and address. It is valid
// while the op runs. The checks return the argument, so that a declaration reads as its contract.
class Arg {
 public:
  Arg(const char* op, const char* name, const Tensor& tensor, DeviceId device);

  // --- checks ---
  const Arg& floating() const;  // float32, float16 or bfloat16
  const Arg& float32() const;   // float32
  const Arg& bfloat16() const;  // bfloat16
  const Arg& int32() const;     // int32
  // The dtype of `other`; `besides`: what else may be.
  const Arg& dtype_of(const Arg& other, const char* besides = "") const;
  // The dtype of `other`, as that of a dense weight.
  const Arg& weight_of(const Arg& other) const;
  const Arg& fp8() const;                    // float8_e4m3fn
  const Arg& uint8(const char* what) const;  // uint8, because it is `what`
  const Arg& rank(int64_t rank, const char* meaning) const;
  const Arg& shape(std::initializer_list<int64_t> expected,
                   const char* meaning) const;  // kAny matches every size
  const Arg& at_least(int64_t dim, int64_t size, const char* meaning) const;
  const Arg& even(int64_t dim, const char* meaning) const;
  const Arg& contiguous() const;
  const Arg& last_contiguous()
      const;  // elements of the last dimension are neighbours; other strides are free
  // It is written: no two of its elements are one in memory, and none is an element of `others`
  // (null: an argument that was not given).
  const Arg& written(std::initializer_list<const Arg*> others) const;

  static constexpr int64_t kAny = -1;

  // --- values ---
  const char* op() const { return op_; }
  const char* name() const { return name_; }
  DeviceId device() const { return device_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  DType dtype() const;  // after floating(), float32() or bfloat16()
  bool is_fp8() const;
  bool is_uint8() const;
  template <typename T>
  T* data() const {
    return static_cast<T*>(data_);
  }

 private:
  bool is_contiguous() const;
  Footprint footprint() const;
  bool shares_memory(const Arg& other) const;
  [[noreturn]] void fail_dtype(const char* expected) const;

  const char* op_;
  const char* name_;
  DeviceId device_;
  int64_t rank_;
  const int64_t* sizes_;
  const int64_t* strides_;
  torch::headeronly::ScalarType type_;
  int64_t element_size_;
  int64_t counts_;  // bytes from the first element to behind the last; 0 if there is none
  void* data_;      // null on Meta
};

// An argument that may be absent.
class OptionalArg {
 public:
  OptionalArg() = default;
  explicit OptionalArg(const Arg& arg) : arg_(arg) {}
  explicit operator bool() const { return arg_.has_value(); }
  const Arg* operator->() const { return &*arg_; }
  const Arg* get() const { return arg_ ? &*arg_ : nullptr; }
  template <typename T>
  T* data() const {
    return arg_ ? arg_->data<T>() : nullptr;
  }

 private:
  std::optional<Arg> arg_;
};

// The arguments of one call: they must all be on one device, that of the first.
class Args {
 public:
  explicit Args(const char* op) : op_(op) {}
  const char* op() const { return op_; }
  Arg operator()(const char* name, const Tensor& tensor);
  OptionalArg operator()(const char* name, const std::optional<Tensor>& tensor) {
    return tensor ? OptionalArg((*this)(name, *tensor)) : OptionalArg();
  }

 private:
  const char* op_;
  const char* first_name_ = nullptr;
  DeviceId device_;
};

// int32, at least one element: the first is the number of leading tokens to compute. Absent: all.
OptionalArg counts_argument(Args& arg, const std::optional<Tensor>& counts);

// A scalar argument that must be finite in float32; an epsilon must not be negative either.
float check_epsilon(const char* op, double eps);
float check_scale(const char* op, double scale);

}  // namespace photon::ops
