// spatial_features_into, choose_value_: values of spatial answers as inputs, and from logits.
#include "common/spatial.h"

#include "cpu/spatial.h"
#include "cuda/step/spatial.h"
#include "ops/dispatch.h"
#include "ops/tables.h"

namespace photon::ops {
namespace {

// The ids of all values fit int32.
void check_ids(const char* op, int64_t vocab, int64_t bins) {
  constexpr int64_t kMostBins = 32768;
  if (bins < 2 || bins > kMostBins || vocab < 1 || vocab > INT32_MAX - bins - bins * bins)
    fail(op, "vocab is ", vocab, " and there are ", bins,
         " bins, expected 1 or more and 2 or more, with vocab + bins + bins * bins ids in int32");
}

void spatial_features(const Tensor& out_, const Tensor& decode_meta_, const Tensor& coordinate_,
                      const Tensor& size_, int64_t vocab, int64_t bins) {
  Args arg("spatial_features_into");
  const Arg out = arg("out", out_).floating().rank(2, "[tokens, width]").last_contiguous();
  const Arg decode_meta = meta_of(arg, decode_meta_, out.size(0), "[tokens of out, 4]");
  const Arg coordinate =
      arg("coordinate", coordinate_).float32().rank(1, "[frequencies]").contiguous();
  const Arg size =
      arg("size", size_).float32().shape({2, Arg::kAny}, "[2, frequencies]").contiguous();
  out.at_least(1, 2 * (coordinate.size(0) + size.size(1) + 1), "waves of both, and two ones");
  out.written({&decode_meta, &coordinate, &size});
  check_ids(arg.op(), vocab, bins);

  SpatialFeaturesParams p{};
  p.out = out.data<void>();
  p.decode_meta = decode_meta.data<int32_t>();
  p.coordinate = coordinate.data<float>();
  p.size = size.data<float>();
  p.tokens = out.size(0);
  p.width = out.size(1);
  p.coordinates = coordinate.size(0);
  p.sizes = size.size(1);
  p.vocab = vocab;
  p.bins = bins;
  p.out_stride = out.stride(0);
  p.dtype = out.dtype();
  PHOTON_DISPATCH(spatial_features, out, p);
}

void choose_value(const Tensor& sampled_, const Tensor& logits_, const Tensor& segments_,
                  const std::vector<Tensor>& tables_, int64_t vocab) {
  Args arg("choose_value_");
  const TableArgs tables(arg, tables_);
  const Arg sampled = arg("sampled", sampled_).int32().rank(1, "[segments]").contiguous();
  const int64_t count = sampled.size(0);
  const Arg logits = arg("logits", logits_)
                         .floating()
                         .shape({count, Arg::kAny}, "[segments, 3 x bins]")
                         .last_contiguous();
  const Arg segments = segments_of(arg, segments_, count);
  sampled.written({&logits, &segments});
  for (const Arg& table : tables.all) sampled.written({&table});
  if (logits.size(1) % kMostObjectValues != 0)
    fail(arg.op(), "logits has ", logits.size(1), " columns, expected 3 x bins");
  const int64_t bins = logits.size(1) / kMostObjectValues;
  check_ids(arg.op(), vocab, bins);

  ChooseValueParams p{};
  p.sampled = sampled.data<int32_t>();
  p.logits = logits.data<void>();
  p.segments = segments.data<int32_t>();
  p.row_state = tables.row_state().data<int32_t>();
  p.stop_ids = tables.of_rows(kTableStopIds);
  p.rows = tables.rows();
  p.num_segments = count;
  p.vocab = vocab;
  p.bins = bins;
  p.logits_stride = logits.stride(0);
  p.dtype = logits.dtype();
  PHOTON_DISPATCH(choose_value, sampled, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("spatial_features_into", TORCH_BOX(&spatial_features));
  m.impl("choose_value_", TORCH_BOX(&choose_value));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
