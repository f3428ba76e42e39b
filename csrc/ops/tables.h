// The tables of a step, and the list of device tables, that ops take.
#pragma once
#include <initializer_list>
#include <vector>

#include "common/decode_meta.h"
#include "common/params.h"
#include "common/row_state.h"
#include "ops/checks.h"

namespace photon::ops {

inline Arg meta_of(Args& arg, const Tensor& decode_meta, int64_t tokens, const char* meaning) {
  return arg("decode_meta", decode_meta)
      .int32()
      .shape({tokens, kMetaColumns}, meaning)
      .contiguous();
}

inline Arg segments_of(Args& arg, const Tensor& segments, int64_t count = Arg::kAny) {
  return arg("segments", segments)
      .int32()
      .shape({count, kSegmentColumns}, "[segments, 4]")
      .contiguous();
}

inline Arg row_state_of(Args& arg, const Tensor& row_state,
                        const char* meaning = "[rows, columns of row_state.h]") {
  return arg("row_state", row_state).int32().shape({Arg::kAny, kRowColumns}, meaning).contiguous();
}

// How errors name the tensors of a list of tables.
constexpr const char* kTableNames[kMaxTables] = {"tables[0] (row_state)",
                                                 "tables[1] (page_table)",
                                                 "tables[2] (stop_ids)",
                                                 "tables[3] (biases)",
                                                 "tables[4] (token_counts)",
                                                 "tables[5] (seen_bits)",
                                                 "tables[6]",
                                                 "tables[7]"};
constexpr const char* kTableShapes[kLeastTables] = {
    "[rows, columns of row_state.h]", "[rows, pages per row]", "[rows, stop ids per row]"};

// The words of all automata; none where there is no tensor.
inline AutomataWords automata_words(const OptionalArg& automata) {
  if (!automata) return {nullptr, 0};
  automata->int32().rank(1, "[words]").contiguous();
  return {automata->data<int32_t>(), automata->size(0)};
}

// The device tables of a call.
struct TableArgs {
  std::vector<Arg> all;  // row_state, page_table, stop_ids, extensions

  TableArgs(Args& arg, const std::vector<Tensor>& tensors) {
    const int64_t count = static_cast<int64_t>(tensors.size());
    if (count < kLeastTables || count > kMaxTables) {
      fail(arg.op(), "tables has ", count, " tensors, expected ", kLeastTables, " to ", kMaxTables,
           " (kMaxTables): row_state, page_table, stop_ids, then extension tables");
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool is_first = i == kTableRowState;
      const Arg& table = all.emplace_back(arg(kTableNames[i], tensors[i])).int32();
      table.shape({is_first ? Arg::kAny : rows(), is_first ? int64_t{kRowColumns} : Arg::kAny},
                  i < kLeastTables ? kTableShapes[i] : "[rows, words of a row]");
      table.at_least(0, 1, "row 0 is padding").contiguous();
    }
  }

  const Arg& row_state() const { return all[kTableRowState]; }
  int64_t rows() const { return row_state().size(0); }

  // A table by its place in the list; null where the list ends before it, or it has no words.
  RowWords of_rows(DeltaTable place) const {
    if (static_cast<size_t>(place) >= all.size() || all[place].size(1) == 0) return {nullptr, 0};
    return {all[place].data<int32_t>(), all[place].size(1)};
  }

  // None of them shares memory with another, nor with `others` (null: not given).
  void written(std::initializer_list<const Arg*> others) const {
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].written(others);
      for (size_t j = i + 1; j < all.size(); ++j) all[i].written({&all[j]});
    }
  }
};

}  // namespace photon::ops
