#include "ops/weight_arg.h"

#include "common/block_layout.h"

namespace photon::ops {
namespace {

constexpr const char* kFp8Shapes =
    "[n, 1], [n, ceil(k / 128)] or [ceil(n / 128), ceil(k / 128)] of the weight";
constexpr const char* kIntShape = "[n of the weight, groups of columns]";
constexpr const char* kFp4Shape = "[n of the weight, blocks of a row]";

WeightFormat format_of(const Arg& rows, int64_t given) {
  if (given < 0 || given >= kWeightFormats)
    fail(rows.op(), "weight_format is ", given, ", expected 0 to ", kWeightFormats - 1);
  if (given == 0 && rows.is_fp8()) return WeightFormat::kFp8;
  return static_cast<WeightFormat>(given);
}

int64_t blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

}  // namespace

WeightArg::WeightArg(Args& arg, const Arg& given, const WeightTensors& others, const Arg& like,
                     int64_t n, int64_t k, const char* meaning)
    : rows(given),
      scale(arg("weight_scale", others.scale)),
      zero(arg("weight_zero", others.zero)),
      divisor(arg("weight_divisor", others.divisor)),
      k_(k),
      format_(format_of(given, others.format)) {
  if (format_ == WeightFormat::kDense) {
    rows.weight_of(like);
  } else if (format_ == WeightFormat::kFp8) {
    rows.fp8();
  } else {
    rows.uint8(name_of(format_));
  }
  const auto [columns, bytes] = block_layout(format_);
  if (k % columns != 0)
    fail(rows.op(), like.name(), " has ", k, " columns, expected a multiple of ", columns,
         ", the block of ", name_of(format_));
  rows.shape({n, k / columns * bytes}, meaning).last_contiguous();
  if (format_ == WeightFormat::kFp8) check_fp8_scale();
  if (is_int(format_)) check_int_scale();
  if (is_fp4(format_)) check_fp4_scale();
  const bool has_scale = format_ == WeightFormat::kFp8 || is_int(format_) || is_fp4(format_);
  if (scale && !has_scale)
    fail(rows.op(), "weight_scale is a tensor, expected None, because ", rows.name(),
         " is stored as ", name_of(format_));
  if (zero && format_ != WeightFormat::kInt4)
    fail(rows.op(), "weight_zero is a tensor, expected None, because ", rows.name(),
         " is stored as ", name_of(format_));
  if (divisor && !is_fp4(format_))
    fail(rows.op(), "weight_divisor is a tensor, expected None, because ", rows.name(),
         " is stored as ", name_of(format_));
}

Weight WeightArg::weight() const {
  Weight w = {rows.data<void>(), rows.size(0), k_, rows.stride(0), format_, {}};
  if (!scale) return w;
  const int64_t columns = scale->size(1);
  const bool has_offsets = zero && !zero->is_uint8();
  w.scales = {scale->data<void>(),
              has_offsets ? nullptr : zero.data<uint8_t>(),
              has_offsets ? zero.data<void>() : nullptr,
              columns,
              scale->size(0) == w.n ? 1 : kScaleBlock,
              w.k,
              scale->dtype(),
              divisor.data<float>()};
  if (is_int(format_) || is_fp4(format_)) {
    w.scales.columns = w.k / (columns == 0 ? 1 : columns);
  } else if (columns != 1) {
    w.scales.columns = kScaleBlock;
  }
  return w;
}

void WeightArg::check_fp8_scale() const {
  if (!scale)
    fail(rows.op(), "weight_scale is None, expected float32 ", kFp8Shapes, ", because ",
         rows.name(), " is stored as fp8");
  scale->float32().rank(2, kFp8Shapes);
  const bool of_rows = scale->size(0) == rows.size(0);
  if (!of_rows || scale->size(1) != 1)
    scale->shape({of_rows ? rows.size(0) : blocks(rows.size(0)), blocks(k_)}, kFp8Shapes);
  scale->contiguous();
}

void WeightArg::check_int_scale() const {
  if (!scale)
    fail(rows.op(), "weight_scale is None, expected ", kIntShape, ", because ", rows.name(),
         " is stored as ", name_of(format_));
  scale->floating().shape({rows.size(0), Arg::kAny}, kIntShape).contiguous();
  const int64_t groups = scale->size(1), least = block_layout(format_).columns;
  if (k_ > 0 && (groups == 0 || k_ % groups != 0 || k_ / groups % least != 0))
    fail(rows.op(), "weight_scale has ", groups, " groups for ", k_,
         " columns, expected groups of a multiple of ", least);
  if (!zero) return;
  if (!zero->is_uint8()) {
    zero->dtype_of(*scale.get(), ", or uint8");
    if (zero->dtype() == DType::kF32)
      fail(rows.op(),
           "weight_zero and weight_scale have dtype float32, expected float16 or "
           "bfloat16, or a weight_zero of uint8: so each number is rounded once");
  }
  zero->shape({rows.size(0), groups}, "the shape of weight_scale").contiguous();
}

void WeightArg::check_fp4_scale() const {
  const bool is_e8m0 = format_ == WeightFormat::kMxFp4;
  if (!scale)
    fail(rows.op(), "weight_scale is None, expected ", is_e8m0 ? "uint8 " : "float8_e4m3fn ",
         kFp4Shape, ", because ", rows.name(), " is stored as ", name_of(format_));
  is_e8m0 ? scale->uint8("e8m0") : scale->fp8();
  scale->shape({rows.size(0), k_ / block_layout(format_).columns}, kFp4Shape).contiguous();
  if (divisor) divisor->float32().shape({rows.size(0), 1}, "[n of the weight, 1]").contiguous();
}

}  // namespace photon::ops
