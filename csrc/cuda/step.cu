// The head and the tail of a step: begin_step, publish, and the two stand-alone fillers of step input.
#include <climits>

#include "common/out_record.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/segment.cuh"

namespace photon::cuda {
namespace {

constexpr int kHeadThreads = 1024;
constexpr int kHeadWarps = kHeadThreads / kWarpSize;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

struct DeltaTarget {
  int32_t* words;
  int64_t size;
};

__device__ DeltaTarget delta_target(const BeginStepParams& p, int32_t table) {
  switch (table) {
    case kTableRowState:
      return {p.row_state, p.rows * kRowColumns};
    case kTablePages:
      return {p.page_table, p.rows * p.pages_per_row};
    case kTableStopIds:
      return {p.stop_ids, p.rows * p.stops_per_row};
    default:
      return {nullptr, 0};
  }
}

// One warp writes one run of words, or skips a run that would leave its table or the buffer.
__device__ void apply_run(const BeginStepParams& p, int64_t run, int lane) {
  const int32_t* header = p.deltas + kDeltaHeader + run * kDeltaRunWords;
  const int64_t offset = header[1], count = header[2], payload = header[3];
  const DeltaTarget target = delta_target(p, header[0]);
  const bool fits = offset >= 0 && count >= 0 && payload >= 0 && offset + count <= target.size && payload + count <= p.delta_words;
  if (!fits) return;
  for (int64_t i = lane; i < count; i += kWarpSize) target.words[offset + i] = p.deltas[payload + i];
}

// The token of one line of a live segment. Staged tokens are consumed: read once, then gone.
__device__ int32_t take_token(const BeginStepParams& p, const Segment& s, int64_t line) {
  if ((s.flags & kSegmentStaged) == 0) return row_line(p.row_state, s.row)[kRowLastToken];
  const int32_t token = p.staged_ids[line];
  p.staged_ids[line] = kNoToken;
  return token;
}

__device__ void set_line(int32_t* decode_meta, int64_t line, int32_t token, int32_t position, int32_t row) {
  int32_t* meta = decode_meta + line * kMetaColumns;
  meta[kMetaToken] = token;
  meta[kMetaPosition] = position;
  meta[kMetaLength] = position + 1;
  meta[kMetaRow] = row;
}

// One warp fills the lines of one live segment and returns 1 + the last line that is alive, 0 if there is none (per lane).
__device__ int64_t fill_segment(const BeginStepParams& p, const Segment& s, int lane) {
  const bool staged = (s.flags & kSegmentStaged) != 0;
  const int64_t count = staged || s.num_lines < 1 ? s.num_lines : 1;
  const int64_t skip = s.first_line < 0 ? -static_cast<int64_t>(s.first_line) : 0;
  const int64_t first_position = row_line(p.row_state, s.row)[kRowPosition];
  int64_t end = 0;
  for (int64_t i = skip + lane; i < count; i += kWarpSize) {
    const int64_t line = s.first_line + i;
    if (line >= p.num_lines) break;
    const int32_t token = take_token(p, s, line);
    const int64_t position = first_position + i;
    if (token == kNoToken || position < 0 || position >= INT32_MAX) continue;
    set_line(p.decode_meta, line, token, static_cast<int32_t>(position), s.row);
    end = line + 1;
  }
  return end;
}

// One block, because every phase needs the whole of the one before it.
__global__ void __launch_bounds__(kHeadThreads, 1) begin_step_kernel(const BeginStepParams p) {
  __shared__ int32_t extent[kExtentSize];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;

  const int64_t room = (p.delta_words - kDeltaHeader) / kDeltaRunWords;
  const int64_t wanted = p.delta_words > 0 ? p.deltas[0] : 0;
  const int64_t runs = wanted < room ? wanted : room;
  for (int64_t run = warp; run < runs; run += kHeadWarps) apply_run(p, run, lane);
  for (int64_t i = threadIdx.x; i < p.num_lines * kMetaColumns; i += kHeadThreads) p.decode_meta[i] = 0;
  if (threadIdx.x < kExtentSize) extent[threadIdx.x] = 0;
  __syncthreads();

  if (threadIdx.x == 0 && p.delta_words > 0) p.deltas[0] = 0;
  for (int64_t r = warp; r < p.num_segments; r += kHeadWarps) {
    const Segment s = load_segment(p.segments, r);
    if (!is_alive(p.row_state, s.row, p.rows)) continue;
    const int64_t end = fill_segment(p, s, lane);
    if (end > 0) atomicMax(&extent[kExtentLines], static_cast<int32_t>(end));
    if (lane == 0 && (s.flags & kSegmentSample) != 0) atomicMax(&extent[kExtentSegments], static_cast<int32_t>(r + 1));
  }
  __syncthreads();
  if (threadIdx.x < kExtentSize) p.extent[threadIdx.x] = extent[threadIdx.x];
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
  if (position >= 0 && position < INT32_MAX) {
    set_line(p.decode_meta, i, p.tokens[i], position, p.rows != nullptr ? p.rows[i] : static_cast<int32_t>(i));
  } else {
    for (int c = 0; c < kMetaColumns; ++c) p.decode_meta[i * kMetaColumns + c] = 0;
  }
}

struct Record {
  int32_t row, generation, num_tokens, flags, token;
};

__device__ void write_record(const PublishParams& p, int64_t segment, const Record& record, int lane) {
  int32_t* out = p.out_record + segment * p.record_width;
  for (int64_t i = kRecordTokens + 1 + lane; i < p.record_width; i += kWarpSize) out[i] = -1;
  if (lane != 0) return;
  out[kRecordRow] = record.row;
  out[kRecordGeneration] = record.generation;
  out[kRecordNumTokens] = record.num_tokens;
  out[kRecordFlags] = record.flags;
  out[kRecordTokens] = record.token;
}

__device__ bool is_stop_id(const PublishParams& p, int32_t row, int32_t stop_count, int32_t token, int lane) {
  const int32_t* ids = p.stop_ids + row * p.stops_per_row;
  const int64_t count = stop_count < p.stops_per_row ? stop_count : p.stops_per_row;
  bool found = false;
  for (int64_t i = lane; i < count; i += kWarpSize) found |= ids[i] == token;
  return __any_sync(kFullWarp, found) != 0;
}

// One warp per segment: its lanes scan the stop ids together, lane 0 writes the row.
__global__ void __launch_bounds__(kThreads) publish_kernel(const PublishParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (r >= p.num_segments) return;
  const Segment s = load_segment(p.segments, r);
  if (!is_alive(p.row_state, s.row, p.rows)) {
    const int32_t generation = is_row(s.row, p.rows) ? row_line(p.row_state, s.row)[kRowGeneration] : 0;
    write_record(p, r, {s.row, generation, 0, kRecordDead, -1}, lane);
    return;
  }
  int32_t* row = row_line(p.row_state, s.row);
  const int32_t generation = row[kRowGeneration], position = wrapping_add(row[kRowPosition], s.num_lines);
  const int32_t remaining = wrapping_add(row[kRowRemaining], -1), stop_count = row[kRowStopCount];
  __syncwarp();  // every lane has read the row before lane 0 changes it
  if (lane == 0) row[kRowPosition] = position;
  if ((s.flags & kSegmentSample) == 0) {
    write_record(p, r, {s.row, generation, 0, 0, -1}, lane);
    return;
  }
  const int32_t token = p.sampled[r];
  const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
  if (errors != 0 || token < 0) {
    if (lane == 0) row[kRowAlive] = 0;
    write_record(p, r, {s.row, generation, 0, errors != 0 ? errors : kRecordNoCandidate, -1}, lane);
    return;
  }
  const int32_t flags = is_stop_id(p, s.row, stop_count, token, lane) ? kRecordStop : remaining <= 0 ? kRecordLength : 0;
  if (lane == 0) {
    row[kRowLastToken] = token;
    row[kRowRemaining] = remaining;
    if (flags != 0) row[kRowAlive] = 0;
  }
  write_record(p, r, {s.row, generation, 1, flags, token}, lane);
}

}  // namespace

int begin_step(const BeginStepParams& p, void* stream) { return launch(begin_step_kernel, 1, kHeadThreads, stream, p); }

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
  return launch(publish_kernel, ceil_div(p.num_segments, kWarps), kThreads, stream, p);
}

}  // namespace photon::cuda
