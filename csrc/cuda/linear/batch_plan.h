// How the linears of a batch (batch_linear.cuh) divide their work: by number of tokens and shape
// alone, for the 132 SMs of an H100 or H200.
//
// What was found on an H200 (benchmarks/FINDINGS.md), and is the rule here: a CTA for each SM, in
// as few waves as possible. Not more CTAs than need be read the same tokens at once, so tiles of
// outputs have 64 rows at least and those of SwiGLU 96, and where that leaves a share of few rows,
// tiles have 64 tokens. With more than 128 tokens outputs and SwiGLU of few rows have two CTAs an
// SM, which hide each other's waits. Rings as large as leaves room for a CTA of the next kernel
// beside one of these, but for SwiGLU of many rows by 128 tokens, where three stages are too few.
#pragma once
#include <cstdint>

#include "cuda/residency.cuh"

namespace photon::cuda::batch {

// What a kernel makes of its sums. kOutput: outputs. kSwiglu: SwiGLU of two. kPartial: the sums
// themselves, for one part of the columns, which sum_norm_kernel adds up.
enum class Finish { kOutput, kSwiglu, kPartial };

constexpr int kBatchSms = 132;
constexpr int kBatchBlockTokens = 64;  // a tile has one block of tokens, or two
constexpr int kBatchRowBytes = 128;    // of a stage, which is a K block
constexpr int kBatchMaxStages = 16;
constexpr int kBatchBarrierBytes = 3 * kBatchMaxStages * 8,
              kStoredBarrierBytes = 2 * kBatchMaxStages * 8;
constexpr int kBatchSplits = 4;  // parts of the columns where sums are left for the norm

struct Plan {
  int blocks;                   // of 64 tokens, of a tile
  int rows;                     // of the weight, of a tile
  int splits;                   // parts of the columns
  int x_stages, weight_stages;  // of the rings
  int stored_stages;            // of the ring of rows as they are stored, of a weight of fewer bits
  int shared_bytes;             // of a CTA
};

constexpr int kBatchRows[] = {32, 64, 80, 96, 128, 152, 160, 192};

// Whether there is such a kernel.
constexpr bool has_batch_rows(Finish finish, int rows) {
  switch (finish) {
    case Finish::kOutput:
      return rows == 64 || rows == 96 || rows == 128;
    case Finish::kSwiglu:
      return rows == 96 || rows == 128 || rows == 152 || rows == 192;
    case Finish::kPartial:
      return rows <= 128 || rows == 160;
  }
  return false;
}

constexpr int64_t batch_units(int64_t all, int64_t each) { return (all + each - 1) / each; }

// Rows of a tile: those by which the waves of `at_once` CTAs go through the fewest; of equals the
// most.
constexpr int batch_rows(Finish finish, int64_t rows, int64_t parts, int least, int at_once) {
  int best = 0;
  int64_t fewest = INT64_MAX;
  for (const int each : kBatchRows) {
    if (!has_batch_rows(finish, each) || each < least) continue;
    const int64_t waves = batch_units(batch_units(rows, each) * parts, at_once);
    if (waves * each > fewest) continue;
    fewest = waves * each;
    best = each;
  }
  return best;
}

// Fills the rings: what x leaves is for rows.
constexpr Plan with_rings(Plan plan) {
  const int x_bytes = plan.blocks * kBatchBlockTokens * kBatchRowBytes;
  const int stages = (plan.shared_bytes - kBatchBarrierBytes - plan.x_stages * x_bytes) /
                     (plan.rows * kBatchRowBytes);
  plan.weight_stages = stages < kBatchMaxStages ? stages : kBatchMaxStages;
  return plan;
}

// How many parts of the columns there are: of more than 128 tokens two where four would have fewer
// than 12 steps each; and of outputs none where tiles have 64 tokens.
constexpr int batch_splits(Finish finish, int64_t steps, bool is_many, int blocks) {
  if (finish == Finish::kSwiglu) return 1;
  if (finish == Finish::kOutput) return steps > 1 ? blocks : 1;
  const int64_t wanted = is_many && steps < 12 * kBatchSplits ? kBatchSplits / 2 : kBatchSplits;
  return static_cast<int>(wanted < steps ? wanted : steps);
}

// Rows of a tile, at least.
constexpr int least_rows(Finish finish, bool is_many, int blocks) {
  if (finish == Finish::kPartial && blocks == 2) return 64;
  if (finish == Finish::kPartial) return is_many ? 96 : 32;
  return finish == Finish::kOutput && blocks == 1 ? 64 : 96;
}

// The rings of a weight of fewer bits, whose CTA has an SM alone.
constexpr Plan with_stored_rings(Plan plan) {
  const int row_bytes = plan.rows * kBatchRowBytes,
            x_bytes = plan.blocks * kBatchBlockTokens * kBatchRowBytes;
  plan.shared_bytes = kOnlyBlock;
  plan.x_stages = 4;
  const int room = plan.shared_bytes - kBatchBarrierBytes - kStoredBarrierBytes,
            rest = (room - plan.x_stages * x_bytes) / row_bytes;
  plan.weight_stages = rest < 7 ? 3 : 4;
  plan.stored_stages = rest - plan.weight_stages;
  if (plan.stored_stages > kBatchMaxStages) plan.stored_stages = kBatchMaxStages;
  return plan;
}

// Of `tokens` by `rows` rows of the weight, gate and up rows both, of `steps` K blocks. (Of fp8
// they have twice the columns; all that follows was found with those of bfloat16.)
constexpr Plan batch_plan(Finish finish, int64_t tokens, int64_t rows, int64_t steps) {
  Plan plan{};
  const bool is_partial = finish == Finish::kPartial, is_many = tokens > 2 * kBatchBlockTokens;
  const int64_t all_rows = rows * (is_partial ? batch_splits(finish, steps, is_many, 1) : 1);
  const bool is_narrow = all_rows < 48 * kBatchSms && (finish != Finish::kOutput || is_many);
  plan.blocks = tokens > kBatchBlockTokens && !is_narrow ? 2 : 1;
  plan.splits = batch_splits(finish, steps, is_many, plan.blocks);
  const int64_t token_tiles = batch_units(tokens, plan.blocks * kBatchBlockTokens);
  const bool share_sms = is_many && is_narrow && !is_partial;
  plan.rows =
      batch_rows(finish, rows, token_tiles * plan.splits, least_rows(finish, is_many, plan.blocks),
                 share_sms ? 2 * kBatchSms : kBatchSms);
  const bool is_alone = plan.blocks == 2 && plan.rows > 128 && finish == Finish::kSwiglu;
  plan.shared_bytes = is_alone ? kOnlyBlock : is_partial ? kLargerBlock : kSmallerBlock;
  plan.x_stages = is_alone ? 6 : plan.blocks == 2 ? 3 : plan.rows > 96 ? 4 : 6;
  return with_rings(plan);
}

// The same of a weight of fewer bits, whose parts of the columns consist of `unit` K blocks.
constexpr Plan stored_batch_plan(Finish finish, int64_t tokens, int64_t rows, int64_t steps,
                                 int64_t unit) {
  Plan plan = batch_plan(finish, tokens, rows, steps);
  if (plan.splits > steps / unit) plan.splits = static_cast<int>(steps / unit);
  return with_stored_rings(plan);
}

}  // namespace photon::cuda::batch
