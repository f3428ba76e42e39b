// begin_step_, carry_over_ids_, decode_meta_set_, publish_: the int32 tables at the head and the
// tail of a step.
#include "common/decode_meta.h"
#include "common/out_record.h"
#include "common/row_state.h"
#include "ops/dispatch.h"
#include "ops/tables.h"

namespace photon::ops {
namespace {

void begin_step(const std::vector<Tensor>& tables_, const Tensor& deltas_, const Tensor& segments_,
                const Tensor& staged_ids_, const Tensor& decode_meta_, const Tensor& counts_) {
  Args arg("begin_step_");
  const TableArgs tables(arg, tables_);
  const Arg deltas = arg("deltas", deltas_)
                         .int32()
                         .rank(1, "[words]")
                         .at_least(0, kDeltaHeader, "the header")
                         .contiguous();
  const Arg segments = segments_of(arg, segments_);
  const Arg staged_ids = arg("staged_ids", staged_ids_).int32().rank(1, "[tokens]").contiguous();
  const int64_t num_tokens = staged_ids.size(0);
  const Arg decode_meta = meta_of(arg, decode_meta_, num_tokens, "[tokens of staged_ids, 4]");
  const Arg counts = arg("counts", counts_)
                         .int32()
                         .shape({kCountsSize}, "[decode tokens, tokens, sampled segments]")
                         .contiguous();
  tables.written({&deltas, &segments, &staged_ids, &decode_meta, &counts});
  deltas.written({&segments, &staged_ids, &decode_meta, &counts});
  staged_ids.written({&segments, &decode_meta, &counts});
  decode_meta.written({&segments, &counts});
  counts.written({&segments});

  BeginStepParams p{};
  for (const Arg& table : tables.all)
    p.tables[p.num_tables++] = {table.data<int32_t>(), table.size(0) * table.size(1)};
  p.deltas = deltas.data<int32_t>();
  p.segments = segments.data<int32_t>();
  p.staged_ids = staged_ids.data<int32_t>();
  p.decode_meta = decode_meta.data<int32_t>();
  p.counts = counts.data<int32_t>();
  p.rows = tables.rows();
  p.delta_words = deltas.size(0);
  p.num_segments = segments.size(0);
  p.num_tokens = num_tokens;
  PHOTON_DISPATCH(begin_step, deltas, p);
}

void carry_over_ids(const Tensor& next_, const Tensor& prev_, const Tensor& idx_) {
  Args arg("carry_over_ids_");
  const Arg next = arg("next", next_).int32().rank(1, "[n]").contiguous();
  const Arg prev = arg("prev", prev_).int32().rank(1, "[ids of the previous step]").contiguous();
  const Arg idx = arg("idx", idx_).int32().shape({next.size(0)}, "[n of next]").contiguous();
  next.written({&prev, &idx});

  CarryOverIdsParams p{};
  p.next = next.data<int32_t>();
  p.prev = prev.data<int32_t>();
  p.idx = idx.data<int32_t>();
  p.n = next.size(0);
  p.num_prev = prev.size(0);
  PHOTON_DISPATCH(carry_over_ids, next, p);
}

void decode_meta_set(const Tensor& decode_meta_, const Tensor& tokens_, const Tensor& positions_,
                     const std::optional<Tensor>& rows_) {
  Args arg("decode_meta_set_");
  const Arg decode_meta = meta_of(arg, decode_meta_, Arg::kAny, "[tokens, 4]");
  const int64_t num_tokens = decode_meta.size(0);
  const Arg tokens =
      arg("tokens", tokens_).int32().shape({num_tokens}, "[tokens of decode_meta]").contiguous();
  const Arg positions = arg("positions", positions_)
                            .int32()
                            .shape({num_tokens}, "[tokens of decode_meta]")
                            .contiguous();
  const OptionalArg rows = arg("rows", rows_);
  if (rows) rows->int32().shape({num_tokens}, "[tokens of decode_meta]").contiguous();
  decode_meta.written({&tokens, &positions, rows.get()});

  DecodeMetaSetParams p{};
  p.decode_meta = decode_meta.data<int32_t>();
  p.tokens = tokens.data<int32_t>();
  p.positions = positions.data<int32_t>();
  p.rows = rows.data<int32_t>();
  p.n = num_tokens;
  PHOTON_DISPATCH(decode_meta_set, decode_meta, p);
}

void publish(const std::vector<Tensor>& tables_, const Tensor& out_record_, const Tensor& sampled_,
             const Tensor& segments_, const std::optional<Tensor>& row_errors_,
             const std::optional<Tensor>& automata_) {
  Args arg("publish_");
  const TableArgs tables(arg, tables_);
  const Arg segments = segments_of(arg, segments_);
  const int64_t count = segments.size(0);
  const Arg out_record = arg("out_record", out_record_)
                             .int32()
                             .shape({count, Arg::kAny}, "[segments, words]")
                             .contiguous();
  out_record.at_least(1, kRecordTokens + 1, "row, generation, count, flags, a token");
  const Arg sampled = arg("sampled", sampled_).int32().shape({count}, "[segments]").contiguous();
  const OptionalArg row_errors = arg("row_errors", row_errors_);
  if (row_errors) row_errors->int32().shape({count}, "[segments]").contiguous();
  tables.written({&out_record, &sampled, &segments, row_errors.get()});
  out_record.written({&sampled, &segments, row_errors.get()});

  const OptionalArg automata = arg("automata", automata_);
  PublishParams p{};
  p.automata = automata_words(automata);
  p.row_state = tables.row_state().data<int32_t>();
  p.out_record = out_record.data<int32_t>();
  p.sampled = sampled.data<int32_t>();
  p.segments = segments.data<int32_t>();
  p.stop_ids = tables.of_rows(kTableStopIds);
  p.token_counts = tables.of_rows(kTableTokenCounts);
  p.seen_bits = tables.of_rows(kTableSeenBits);
  p.row_errors = row_errors.data<int32_t>();
  p.rows = tables.rows();
  p.num_segments = count;
  p.record_width = out_record.size(1);
  PHOTON_DISPATCH(publish, segments, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("begin_step_", TORCH_BOX(&begin_step));
  m.impl("carry_over_ids_", TORCH_BOX(&carry_over_ids));
  m.impl("decode_meta_set_", TORCH_BOX(&decode_meta_set));
  m.impl("publish_", TORCH_BOX(&publish));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
