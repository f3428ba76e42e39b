// The head and the tail of a step: begin_step, publish, and the two stand-alone fillers of step
// input.
#include "common/deltas.h"
#include "common/out_record.h"
#include "common/penalties.h"
#include "common/segment.h"
#include "common/token.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sampling/automaton.cuh"

namespace photon::cuda {
namespace {

constexpr int kHeadThreads = 1024;
constexpr int kHeadWarps = kHeadThreads / kWarpSize;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// Whether a row is alive, as one answer for the whole warp. Without the vote lanes could disagree:
// where two segments name a row, another warp may be ending it at this moment.
__device__ bool is_alive_for_warp(const int32_t* row_state, int32_t row, int64_t rows) {
  return __any_sync(kFullWarp, is_alive(row_state, row, rows)) != 0;
}

// Copies the words of a run into their table. One warp calls it.
__device__ void apply_run(const DeltaRun& run, int lane) {
  for (int64_t i = lane; i < run.count; i += kWarpSize) run.to[i] = run.word(i);
}

__device__ void count_token(const TokenPlaces& at) {
  if (at.count != nullptr) atomicAdd(at.count, 1);
  if (at.seen != nullptr) atomicOr(at.seen, at.bit);
}

// Fills decode_meta for the tokens of one live segment, and returns 1 + the last of them. Where the
// id of a token is missing, it ends the row instead: the segment's tokens stay dead, and the result
// is 0. One warp calls it, or a thread for itself (kLanes 1).
template <int kLanes>
__device__ int64_t fill_segment(const BeginStepParams& p, const Segment& s, int lane) {
  int32_t* row = row_words(p.row_state(), s.row);
  bool missing = !fits_step(s, p.row_state(), p.num_tokens);
  const int32_t first_position = row[kRowPosition], count = missing ? 0 : s.num_tokens;
  for (int32_t i = lane; i < count; i += kLanes) {
    const int64_t token_index = static_cast<int64_t>(s.first_token) + i;
    const int32_t token = take_token(s, p.row_state(), p.staged_ids, token_index);
    missing |= token == kNoToken;
    set_token(p.decode_meta, token_index, token, first_position + i, s.row);
  }
  if constexpr (kLanes > 1)  // the vote comes after every lane has read the row
    missing = __any_sync(kFullWarp, missing) != 0;
  if (!missing) {
    for (int32_t i = lane; i < count; i += kLanes) count_token(answer_places(p, s, i));
    return last_token(s, p.num_tokens) + 1;
  }
  for (int32_t i = lane; i < count; i += kLanes)
    clear_token(p.decode_meta, static_cast<int64_t>(s.first_token) + i);
  if (lane == 0) row[kRowAlive] = 0;
  return 0;
}

__device__ Segment of_lane(const Segment& s, int lane) {
  return {__shfl_sync(kFullWarp, s.row, lane), __shfl_sync(kFullWarp, s.first_token, lane),
          __shfl_sync(kFullWarp, s.num_tokens, lane), __shfl_sync(kFullWarp, s.flags, lane)};
}

// Fills a segment for each lane, where `alive`: those of one token side by side, the others one
// after the other, each by the whole warp. Returns as fill_segment() of the lane's.
__device__ int64_t fill_segments(const BeginStepParams& p, const Segment& s, bool alive, int lane) {
  int64_t end = 0;
  if (alive && s.num_tokens == 1) end = fill_segment<1>(p, s, 0);
  unsigned left = __ballot_sync(kFullWarp, alive && s.num_tokens != 1);
  for (; left != 0; left &= left - 1) {
    const int owner = __ffs(static_cast<int>(left)) - 1;
    const int64_t filled = fill_segment<kWarpSize>(p, of_lane(s, owner), lane);
    if (lane == owner) end = filled;
  }
  return end;
}

// It is one CTA, because every phase needs all of the phase before. It does not let the next kernel
// start early, because that kernel may read decode_meta, the tables and counts before it waits, and
// they are complete only when this kernel has ended.
__global__ void __launch_bounds__(kHeadThreads, 1)
    begin_step_kernel(const __grid_constant__ BeginStepParams p) {
  __shared__ int32_t counts[kCountsSize];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;

  const int64_t runs = num_delta_runs(p);
  for (int64_t run = warp; run < runs; run += kHeadWarps) apply_run(delta_run(p, run), lane);
  for (int64_t i = threadIdx.x; i < p.num_tokens * kMetaColumns; i += kHeadThreads)
    p.decode_meta[i] = 0;
  if (threadIdx.x < kCountsSize) counts[threadIdx.x] = 0;
  __syncthreads();

  if (threadIdx.x == 0 && p.delta_words > 0) p.deltas[0] = 0;
  for (int64_t begin = 0; begin < p.num_segments; begin += kHeadThreads) {
    const int64_t r = begin + lane * kHeadWarps + warp;  // few segments have a warp each
    const Segment s = r < p.num_segments ? load_segment(p.segments, r) : Segment{};
    const int64_t end = fill_segments(p, s, is_alive(p.row_state(), s.row, p.rows), lane);
    if (end == 0) continue;
    if ((s.flags & kSegmentStaged) == 0)
      atomicMax(&counts[kCountDecodeTokens], static_cast<int32_t>(end));
    atomicMax(&counts[kCountTokens], static_cast<int32_t>(end));
    if ((s.flags & kSegmentSample) != 0)
      atomicMax(&counts[kCountSegments], static_cast<int32_t>(r + 1));
  }
  __syncthreads();
  if (threadIdx.x < kCountsSize) p.counts[threadIdx.x] = counts[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads) carry_over_ids_kernel(const CarryOverIdsParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.n) return;
  const int32_t from = p.idx[i];
  if (from >= 0 && from < p.num_prev) p.next[i] = p.prev[from];
}

__global__ void __launch_bounds__(kThreads) decode_meta_set_kernel(const DecodeMetaSetParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.n) return;
  const int32_t position = p.positions[i];
  if (is_position(position)) {
    set_token(p.decode_meta, i, p.tokens[i], position,
              p.rows != nullptr ? p.rows[i] : static_cast<int32_t>(i));
  } else {
    clear_token(p.decode_meta, i);
  }
}

struct Record {
  int32_t row, generation, num_tokens, flags, token;
};

__device__ void write_record(const PublishParams& p, int64_t segment, const Record& record,
                             int lane) {
  int32_t* out = p.out_record + segment * p.record_width;
  for (int64_t i = kRecordTokens + 1 + lane; i < p.record_width; i += kWarpSize) out[i] = -1;
  if (lane != 0) return;
  out[kRecordRow] = record.row;
  out[kRecordGeneration] = record.generation;
  out[kRecordNumTokens] = record.num_tokens;
  out[kRecordFlags] = record.flags;
  out[kRecordTokens] = record.token;
}

__device__ bool is_stop_id(const PublishParams& p, int32_t row, int32_t stop_count, int32_t token,
                           int lane) {
  const int32_t* ids = row_words(p.stop_ids, row);
  const int64_t count = valid_entries(stop_count, p.stop_ids);
  bool found = false;
  for (int64_t i = lane; i < count; i += kWarpSize) found |= ids[i] == token;
  return __any_sync(kFullWarp, found) != 0;
}

// A warp takes a segment: its lanes look for the token among the stop ids, and lane 0 writes the
// row.
__global__ void __launch_bounds__(kThreads) publish_kernel(const PublishParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  wait_for_earlier();
  if (r >= p.num_segments) return;
  const Segment s = load_segment(p.segments, r);
  const int32_t token = p.sampled[r];
  const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
  if (!is_alive_for_warp(p.row_state, s.row, p.rows)) {
    const int32_t generation =
        is_row(s.row, p.rows) ? row_words(p.row_state, s.row)[kRowGeneration] : 0;
    write_record(p, r, {s.row, generation, 0, kRecordDead, -1}, lane);
    return;
  }
  int32_t* row = row_words(p.row_state, s.row);
  const int32_t generation = row[kRowGeneration],
                position = wrapping_add(row[kRowPosition], s.num_tokens);
  const int32_t remaining = wrapping_add(row[kRowRemaining], -1), stop_count = row[kRowStopCount];
  const Automaton automaton = load_automaton(p.automata, p.row_state, s.row, 0);
  __syncwarp();  // every lane has read the row before lane 0 changes it
  if (lane == 0) row[kRowPosition] = position;
  if ((s.flags & kSegmentSample) == 0) {
    write_record(p, r, {s.row, generation, 0, 0, -1}, lane);
    return;
  }
  if (errors != 0 || token < 0) {
    if (lane == 0) row[kRowAlive] = 0;
    const int32_t missing = automaton.is_error ? kRecordAutomatonError : kRecordNoCandidate;
    write_record(p, r, {s.row, generation, 0, errors != 0 ? errors : missing, -1}, lane);
    return;
  }
  const bool stops = is_stop_id(p, s.row, stop_count, token, lane);
  const AutomatonStep step = stops ? AutomatonStep{kRecordStop, kNoState}
                                   : step_automaton(p.automata, automaton, token, lane);
  if (step.flags == kRecordAutomatonError) {
    if (lane == 0) row[kRowAlive] = 0;
    write_record(p, r, {s.row, generation, 0, step.flags, -1}, lane);
    return;
  }
  const int32_t flags = step.flags == 0 && remaining <= 0 ? kRecordLength : step.flags;
  if (lane == 0) {
    if (step.state != kNoState) row[kRowAutomatonState] = step.state;
    count_token(token_places(p.token_counts, p.seen_bits, p.row_state, s.row, token));
    row[kRowLastToken] = token;
    row[kRowRemaining] = remaining;
    if (flags != 0) row[kRowAlive] = 0;
  }
  write_record(p, r, {s.row, generation, 1, flags, token}, lane);
}

}  // namespace

int begin_step(const BeginStepParams& p, void* stream) {
  return launch(begin_step_kernel, 1, kHeadThreads, stream, p);
}

int carry_over_ids(const CarryOverIdsParams& p, void* stream) {
  if (p.n == 0) return 0;
  return launch(carry_over_ids_kernel, ceil_div(p.n, kThreads), kThreads, stream, p);
}

int decode_meta_set(const DecodeMetaSetParams& p, void* stream) {
  if (p.n == 0) return 0;
  return launch(decode_meta_set_kernel, ceil_div(p.n, kThreads), kThreads, stream, p);
}

int publish(const PublishParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  return launch(publish_kernel, waiting_shape(ceil_div(p.num_segments, kWarps), kThreads), stream,
                p);
}

}  // namespace photon::cuda
