// embedding_into, select_tokens_into: rows of matrices by token, and by a segment's last token.
#include "common/decode_meta.h"
#include "ops/dispatch.h"
#include "ops/tables.h"
#include "ops/weight_arg.h"

namespace photon::ops {
namespace {

void embedding(const Tensor& out_, const Tensor& decode_meta_, const Tensor& weight_,
               const std::optional<Tensor>& embeds_, const std::optional<Tensor>& scale_,
               int64_t format, const std::optional<Tensor>& zero_,
               const std::optional<Tensor>& divisor_) {
  Args arg("embedding_into");
  const Arg rows = arg("weight", weight_).rank(2, "[vocab, hidden]");
  const bool is_dense = format == 0 && !rows.is_fp8();
  if (is_dense) rows.floating();
  const Arg decode_meta = meta_of(arg, decode_meta_, Arg::kAny, "[tokens, 4]");
  const Arg out = is_dense ? arg("out", out_).dtype_of(rows) : arg("out", out_).floating();
  out.shape({decode_meta.size(0), is_dense ? rows.size(1) : Arg::kAny},
            "[tokens of decode_meta, hidden of weight]");
  const WeightArg weight(arg, rows, {scale_, format, zero_, divisor_}, out, Arg::kAny, out.size(1),
                         "[vocab, hidden of out]");
  rows.contiguous();
  const OptionalArg embeds = arg("embeds", embeds_);
  if (embeds)
    embeds->dtype_of(out)
        .shape({Arg::kAny, out.size(1)}, "[embeddings, hidden of weight]")
        .contiguous();
  out.last_contiguous().written({&decode_meta, &rows, embeds.get(), weight.scale.get(),
                                 weight.zero.get(), weight.divisor.get()});

  EmbeddingParams p{};
  p.out = out.data<void>();
  p.decode_meta = decode_meta.data<int32_t>();
  p.weight = weight.weight();
  p.embeds = embeds.data<void>();
  p.num_embeds = embeds ? embeds->size(0) : 0;
  p.num_tokens = decode_meta.size(0);
  p.out_stride = out.stride(0);
  p.dtype = out.dtype();
  PHOTON_DISPATCH(embedding, out, p);
}

void select_tokens(const Tensor& out_, const Tensor& x_, const Tensor& segments_) {
  Args arg("select_tokens_into");
  const Arg x = arg("x", x_).floating().rank(2, "[tokens, hidden]").last_contiguous();
  const Arg segments = segments_of(arg, segments_);
  const Arg out = arg("out", out_)
                      .dtype_of(x)
                      .shape({segments.size(0), x.size(1)}, "[segments, hidden of x]")
                      .last_contiguous();
  out.written({&x, &segments});

  SelectTokensParams p{};
  p.out = out.data<void>();
  p.x = x.data<void>();
  p.segments = segments.data<int32_t>();
  p.num_segments = segments.size(0);
  p.num_tokens = x.size(0);
  p.hidden = x.size(1);
  p.out_stride = out.stride(0);
  p.x_stride = x.stride(0);
  p.dtype = x.dtype();
  PHOTON_DISPATCH(select_tokens, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("embedding_into", TORCH_BOX(&embedding));
  m.impl("select_tokens_into", TORCH_BOX(&select_tokens));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
