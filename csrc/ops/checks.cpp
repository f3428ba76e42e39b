#include "ops/checks.h"

#include <cmath>

namespace photon::ops {
namespace {

using torch::headeronly::ScalarType;

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "unknown here";
  }
}

struct Dims {  // prints as [3, *, 576]
  const int64_t* values;
  int64_t count;
};

std::ostream& operator<<(std::ostream& out, const Dims& dims) {
  out << "[";
  for (int64_t i = 0; i < dims.count; ++i) {
    out << (i ? ", " : "");
    if (dims.values[i] == Arg::kAny) {
      out << "*";
    } else {
      out << dims.values[i];
    }
  }
  return out << "]";
}

// Elements from the first to behind the last; 0 of an empty tensor.
int64_t counts_of(const int64_t* sizes, const int64_t* strides, int64_t rank) {
  int64_t counts = 1;
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0) return 0;
    counts += (sizes[i] - 1) * strides[i];
  }
  return counts;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const DeviceId& device) {
  if (device.type == aoti_torch_device_type_cpu()) return out << "cpu";
  if (device.type == aoti_torch_device_type_meta()) return out << "meta";
  if (device.type == aoti_torch_device_type_cuda()) return out << "cuda:" << device.index;
  return out << "device type " << device.type;
}

Arg::Arg(const char* op, const char* name, const Tensor& tensor, DeviceId device)
    : op_(op),
      name_(name),
      device_(device),
      rank_(tensor.dim()),
      sizes_(tensor.sizes().data()),
      strides_(tensor.strides().data()),
      type_(tensor.scalar_type()),
      element_size_(static_cast<int64_t>(tensor.element_size())),
      counts_(counts_of(sizes_, strides_, rank_) * element_size_),
      data_(device.type == aoti_torch_device_type_meta() ? nullptr : tensor.data_ptr()) {
  if (data_ == nullptr && device.type != aoti_torch_device_type_meta() && counts_ > 0) {
    fail(op, name, " has shape ", Dims{sizes_, rank_},
         " and no memory: its storage was freed or never allocated");
  }
}

void Arg::fail_dtype(const char* expected) const {
  fail(op_, name_, " has dtype ", dtype_name(type_), ", expected ", expected);
}

const Arg& Arg::floating() const {
  if (type_ != ScalarType::Float && type_ != ScalarType::Half && type_ != ScalarType::BFloat16) {
    fail_dtype("float32, float16 or bfloat16");
  }
  return *this;
}

const Arg& Arg::float32() const {
  if (type_ != ScalarType::Float) fail_dtype("float32");
  return *this;
}

const Arg& Arg::bfloat16() const {
  if (type_ != ScalarType::BFloat16) fail_dtype("bfloat16");
  return *this;
}

const Arg& Arg::int32() const {
  if (type_ != ScalarType::Int) fail_dtype("int32");
  return *this;
}

const Arg& Arg::dtype_of(const Arg& other, const char* besides) const {
  if (type_ != other.type_) {
    fail(op_, name_, " has dtype ", dtype_name(type_), ", expected ", dtype_name(other.type_),
         ", the dtype of ", other.name_, besides);
  }
  return *this;
}

const Arg& Arg::weight_of(const Arg& other) const {
  if (type_ != other.type_ && !is_fp8()) {
    fail(op_, name_, " has dtype ", dtype_name(type_), ", expected ", dtype_name(other.type_),
         ", the dtype of ", other.name_, ", or float8_e4m3fn with weight_scale");
  }
  return *this;
}

const Arg& Arg::fp8() const {
  if (!is_fp8()) fail_dtype("float8_e4m3fn");
  return *this;
}

const Arg& Arg::uint8(const char* what) const {
  if (type_ != ScalarType::Byte) {
    fail(op_, name_, " has dtype ", dtype_name(type_), ", expected uint8, because it is stored as ",
         what);
  }
  return *this;
}

const Arg& Arg::rank(int64_t rank, const char* meaning) const {
  if (rank_ != rank) {
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, ", expected ", rank,
         rank == 1 ? " dimension " : " dimensions ", meaning);
  }
  return *this;
}

const Arg& Arg::shape(std::initializer_list<int64_t> expected, const char* meaning) const {
  bool same = rank_ == static_cast<int64_t>(expected.size());
  for (int64_t i = 0; same && i < rank_; ++i) {
    const int64_t size = expected.begin()[i];
    same = size == kAny || size == sizes_[i];
  }
  if (!same) {
    const Dims wanted{expected.begin(), static_cast<int64_t>(expected.size())};
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, ", expected ", wanted, " (", meaning, ")");
  }
  return *this;
}

const Arg& Arg::at_least(int64_t dim, int64_t size, const char* meaning) const {
  if (sizes_[dim] < size) {
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, ", expected dimension ", dim,
         " to be at least ", size, " (", meaning, ")");
  }
  return *this;
}

const Arg& Arg::even(int64_t dim, const char* meaning) const {
  if (sizes_[dim] % 2 != 0) {
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, ", expected dimension ", dim,
         " to be even (", meaning, ")");
  }
  return *this;
}

bool Arg::is_contiguous() const {
  int64_t expected = 1;
  for (int64_t i = rank_ - 1; i >= 0; --i) {
    if (sizes_[i] != 1 && strides_[i] != expected) return counts_ == 0;
    expected *= sizes_[i];
  }
  return true;
}

const Arg& Arg::contiguous() const {
  if (!is_contiguous()) {
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, " with strides ", Dims{strides_, rank_},
         ", expected a contiguous tensor");
  }
  return *this;
}

const Arg& Arg::last_contiguous() const {
  if (sizes_[rank_ - 1] > 1 && strides_[rank_ - 1] != 1) {
    fail(op_, name_, " has strides ", Dims{strides_, rank_}, ", expected the last one to be 1");
  }
  return *this;
}

const Arg& Arg::written(std::initializer_list<const Arg*> others) const {
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] > 1 && strides_[i] == 0) {
      fail(op_, name_, " has strides ", Dims{strides_, rank_},
           ", expected none to be 0: it is written (an expanded tensor cannot be)");
    }
  }
  if (counts_ == 0) return *this;
  if (!is_contiguous() && footprint().overlaps_itself()) {
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, " with strides ", Dims{strides_, rank_},
         ", expected strides that keep its elements apart, because it is written; pass a "
         "contiguous tensor");
  }
  if (data_ == nullptr) return *this;
  for (const Arg* other : others) {
    if (other != nullptr && shares_memory(*other)) {
      fail(op_, name_, " shares memory with ", other->name_,
           ", expected separate tensors, because ", name_, " is written");
    }
  }
  return *this;
}

Footprint Arg::footprint() const {
  if (rank_ > Footprint::kMaxRank)
    fail(op_, name_, " has shape ", Dims{sizes_, rank_}, ", expected at most 4 dimensions");
  return Footprint(sizes_, strides_, rank_, element_size_);
}

// Views of one buffer, such as q and k of a fused projection, may lie between each other without
// sharing an element. Most arguments are far apart, which the first comparison finds.
bool Arg::shares_memory(const Arg& other) const {
  if (other.data_ == nullptr || other.counts_ == 0) return false;
  const int64_t distance = static_cast<char*>(other.data_) - static_cast<char*>(data_);
  if (distance >= counts_ || -distance >= other.counts_) return false;
  return footprint().overlaps(other.footprint(), distance);
}

bool Arg::is_fp8() const { return type_ == ScalarType::Float8_e4m3fn; }

bool Arg::is_uint8() const { return type_ == ScalarType::Byte; }

DType Arg::dtype() const {
  return type_ == ScalarType::Float  ? DType::kF32
         : type_ == ScalarType::Half ? DType::kF16
                                     : DType::kBF16;
}

Arg Args::operator()(const char* name, const Tensor& tensor) {
  if (!tensor.defined()) fail(op_, name, " is None, expected a tensor");
  DeviceId device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  if (first_name_ == nullptr) {
    first_name_ = name;
    device_ = device;
  } else if (device.type != device_.type || device.index != device_.index) {
    fail(op_, name, " is on ", device, ", ", first_name_, " is on ", device_,
         "; expected all tensors on one device");
  }
  return Arg(op_, name, tensor, device);
}

OptionalArg counts_argument(Args& arg, const std::optional<Tensor>& counts_) {
  const OptionalArg counts = arg("counts", counts_);
  if (counts)
    counts->int32()
        .rank(1, "[tokens to compute]")
        .at_least(0, 1, "the number of tokens to compute")
        .contiguous();
  return counts;
}

float check_epsilon(const char* op, double eps) {
  if (!std::isfinite(static_cast<float>(eps)) || eps < 0)
    fail(op, "eps is ", eps, ", expected a finite number, 0 or more, of float32");
  return static_cast<float>(eps);
}

float check_scale(const char* op, double scale) {
  if (!std::isfinite(static_cast<float>(scale)))
    fail(op, "scale is ", scale,
         ", expected a finite number of float32, such as 1 / sqrt(head_dim)");
  return static_cast<float>(scale);
}

}  // namespace photon::ops
