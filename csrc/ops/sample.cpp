// apply_token_mask_, sample_into: from logits to tokens, one per segment.
#include "common/decode_meta.h"
#include "common/out_record.h"
#include "common/row_state.h"
#include "ops/dispatch.h"
#include "ops/tables.h"

namespace photon::ops {
namespace {

constexpr int64_t kMaskBits = 32;  // ids per word of a mask

void apply_token_mask(const Tensor& logits_, const Tensor& mask_, const Tensor& mask_keys_,
                      const Tensor& segments_, const Tensor& row_state_,
                      const Tensor& row_errors_) {
  Args arg("apply_token_mask_");
  const Arg logits =
      arg("logits", logits_).floating().rank(2, "[segments, vocab]").last_contiguous();
  const int64_t count = logits.size(0), vocab = logits.size(1);
  const Arg mask = arg("mask", mask_).int32().rank(2, "[masks, words], 32 ids a word").contiguous();
  mask.at_least(1, (vocab + kMaskBits - 1) / kMaskBits, "one bit for each id of the vocabulary");
  const Arg mask_keys = arg("mask_keys", mask_keys_)
                            .int32()
                            .shape({count, kMaskKeyColumns}, "[segments, (row, position, place)]")
                            .contiguous();
  const Arg segments = segments_of(arg, segments_, count);
  const Arg row_state = row_state_of(arg, row_state_);
  const Arg row_errors =
      arg("row_errors", row_errors_).int32().shape({count}, "[segments]").contiguous();
  logits.written({&mask, &mask_keys, &segments, &row_state, &row_errors});
  row_errors.written({&mask, &mask_keys, &segments, &row_state});

  ApplyTokenMaskParams p{};
  p.logits = logits.data<void>();
  p.mask = mask.data<int32_t>();
  p.mask_keys = mask_keys.data<int32_t>();
  p.segments = segments.data<int32_t>();
  p.row_state = row_state.data<int32_t>();
  p.row_errors = row_errors.data<int32_t>();
  p.rows = row_state.size(0);
  p.num_segments = count;
  p.vocab = vocab;
  p.num_masks = mask.size(0);
  p.mask_words = mask.size(1);
  p.logits_stride = logits.stride(0);
  p.dtype = logits.dtype();
  PHOTON_DISPATCH(apply_token_mask, logits, p);
}

void sample(const Tensor& out_, const Tensor& logits_, const Tensor& segments_,
            const Tensor& row_state_, const std::optional<Tensor>& row_errors_, bool hopper,
            const std::optional<std::vector<Tensor>>& tables_,
            const std::optional<Tensor>& logprobs_, const std::optional<Tensor>& automata_) {
  Args arg("sample_into");
  const Arg logits = arg("logits", logits_)
                         .floating()
                         .rank(2, "[segments, vocab]")
                         .at_least(1, 1, "a vocabulary")
                         .last_contiguous();
  const int64_t count = logits.size(0);
  const Arg out = arg("out", out_).int32().shape({count}, "[segments]").contiguous();
  const Arg segments = segments_of(arg, segments_, count);
  const Arg row_state = row_state_of(arg, row_state_);
  const OptionalArg row_errors = arg("row_errors", row_errors_);
  if (row_errors)
    row_errors->int32()
        .shape({count}, "[segments]")
        .contiguous()
        .written({&out, &logits, &segments, &row_state});
  std::optional<TableArgs> tables;
  if (tables_) {
    tables.emplace(arg, *tables_);
    tables->row_state().shape({row_state.size(0), kRowColumns}, "[rows of row_state, columns]");
  }
  out.written({&logits, &segments, &row_state});
  logits.written({&segments, &row_state, row_errors.get()});
  for (const Arg& table : tables ? tables->all : std::vector<Arg>()) {
    out.written({&table});
    logits.written({&table});
  }

  const OptionalArg logprobs = arg("logprobs", logprobs_);
  if (logprobs) {
    logprobs->int32().shape({count, Arg::kAny}, "[segments, 1 + 2 n]").contiguous();
    logprobs->at_least(1, 1, "the sampled id's")
        .written({&out, &logits, &segments, &row_state, row_errors.get()});
    for (const Arg& table : tables ? tables->all : std::vector<Arg>()) logprobs->written({&table});
  }

  const OptionalArg automata = arg("automata", automata_);
  SampleParams p{};
  p.automata = automata_words(automata);
  p.out = out.data<int32_t>();
  p.logits = logits.data<void>();
  p.segments = segments.data<int32_t>();
  p.row_state = row_state.data<int32_t>();
  p.row_errors = row_errors.data<int32_t>();
  p.rows = row_state.size(0);
  p.num_segments = count;
  p.vocab = logits.size(1);
  p.logits_stride = logits.stride(0);
  if (tables) {
    p.stop_ids = tables->of_rows(kTableStopIds);
    p.biases = tables->of_rows(kTableBiases);
    p.token_counts = tables->of_rows(kTableTokenCounts);
    p.seen_bits = tables->of_rows(kTableSeenBits);
  }
  if (logprobs) {
    p.logprobs = logprobs.data<int32_t>();
    p.logprobs_width = logprobs->size(1);
  }
  p.hopper = hopper;
  p.dtype = logits.dtype();
  PHOTON_DISPATCH(sample, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("apply_token_mask_", TORCH_BOX(&apply_token_mask));
  m.impl("sample_into", TORCH_BOX(&sample));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
