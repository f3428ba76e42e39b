// From logits to tokens: apply_token_mask and sample.
#include <cmath>

#include "common/mask.h"
#include "common/noise.h"
#include "common/out_record.h"
#include "common/philox.h"
#include "common/segment.h"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"

namespace photon::cuda {
namespace {

constexpr int kMaskThreads = 256;
constexpr int64_t kMaskChunk = 4096;  // ids per block
constexpr int kSampleThreads = 1024;
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
constexpr int kPhiloxIds = 4;      // ids that share one Philox block
constexpr int kSampleCluster = 8;  // blocks that share a row in the fast kernel: one alone cannot load fast enough

template <typename T>
__global__ void __launch_bounds__(kMaskThreads) apply_token_mask_kernel(const ApplyTokenMaskParams p, int64_t chunks) {
  const int64_t r = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const MaskVerdict verdict = judge_mask(p, r);
  if (chunk == 0 && threadIdx.x == 0) p.row_errors[r] = verdict.error;
  if (!verdict.apply) return;
  T* logits = static_cast<T*>(p.logits) + r * p.logits_stride;
  const int32_t* mask = p.mask + r * p.mask_words;
  const int64_t end = (chunk + 1) * kMaskChunk < p.vocab ? (chunk + 1) * kMaskChunk : p.vocab;
  for (int64_t id = chunk * kMaskChunk + threadIdx.x; id < end; id += kMaskThreads) {
    const int64_t word = id / 32;
    const bool allowed = word < p.mask_words && (static_cast<uint32_t>(mask[word]) >> (id % 32) & 1u) != 0;
    if (!allowed) logits[id] = from_float<T>(-INFINITY);
  }
}

struct Candidate {
  float score;
  int32_t id;  // -1: none
};

// A total order on candidates, so that the winner does not depend on the order of comparison: higher score, then lower id.
__device__ bool is_better(const Candidate& a, const Candidate& b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0 && b.id < 0;
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

__device__ Candidate warp_best(Candidate best) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const Candidate other = {__shfl_xor_sync(kFullWarp, best.score, offset), __shfl_xor_sync(kFullWarp, best.id, offset)};
    if (is_better(other, best)) best = other;
  }
  return best;
}

// A block's shared memory: the best of each of its warps; and, in the first block of a cluster, of each block.
struct SampleShared {
  Candidate of_warp[kSampleWarps];
  float score_of_block[kSampleCluster], id_of_block[kSampleCluster];  // an id as the bits of a float
};

// Thread 0's result is the block's.
__device__ Candidate block_best(Candidate best, SampleShared& shared) {
  best = warp_best(best);
  if (threadIdx.x % kWarpSize == 0) shared.of_warp[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  return threadIdx.x < kSampleWarps ? warp_best(shared.of_warp[threadIdx.x]) : best;
}

// Thread 0's result in the first block is the cluster's. All threads of the cluster must call it.
__device__ Candidate cluster_best(Candidate best, SampleShared& shared) {
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    store_in_block(&shared.score_of_block[rank], 0, best.score);
    store_in_block(&shared.id_of_block[rank], 0, __int_as_float(best.id));
  }
  sync_cluster();
  if (rank != 0) return best;
  for (int block = 1; block < kSampleCluster; ++block) {
    const Candidate other = {shared.score_of_block[block], __float_as_int(shared.id_of_block[block])};
    if (is_better(other, best)) best = other;
  }
  return best;
}

__device__ float gumbel(uint32_t bits) { return -logf(-logf(open_uniform(bits))); }

// The best of the ids first .. first + 3. NaN and -inf are no candidates: both fail `v > -inf`.
template <typename T>
__device__ Candidate best_of_four(const T* logits, int64_t first, int64_t vocab, const Noise& noise) {
  float v[kPhiloxIds];
#pragma unroll
  for (int i = 0; i < kPhiloxIds; ++i) v[i] = first + i < vocab ? to_float(logits[first + i]) : -INFINITY;
  const bool greedy = !(noise.temperature > 0.0f);
  Philox4 bits = {};
  // The lanes of token_bits(), four at a time.
  if (!greedy) bits = philox4x32({{static_cast<uint32_t>(first / kPhiloxIds), noise.position, 0u, 0u}}, noise.seed_low, noise.seed_high);
  Candidate best = {0.0f, -1};
#pragma unroll
  for (int i = 0; i < kPhiloxIds; ++i) {
    if (!(v[i] > -INFINITY)) continue;
    const float score = greedy ? v[i] : v[i] / noise.temperature + gumbel(bits.v[i]);
    const Candidate candidate = {score, static_cast<int32_t>(first + i)};
    if (is_better(candidate, best)) best = candidate;
  }
  return best;
}

// kBlocks blocks per segment; more than one are a cluster.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const SampleParams p) {
  const int64_t r = blockIdx.x / kBlocks, part = blockIdx.x % kBlocks;
  SampleShared& shared = *reinterpret_cast<SampleShared*>(dynamic_shared());
  if constexpr (kBlocks > 1) {
    let_next_start();
    sync_cluster();  // all blocks are there, and may be written to
    wait_for_earlier();
  }
  const Segment s = load_segment(p.segments, r);
  const int32_t errors = p.row_errors != nullptr ? p.row_errors[r] : 0;
  if (errors != 0 || !is_sampled(s, p.row_state, p.rows)) {
    if (threadIdx.x == 0 && part == 0) p.out[r] = -1;
    return;
  }
  const T* logits = static_cast<const T*>(p.logits) + r * p.logits_stride;
  const Noise noise = load_noise(s, p.row_state);
  Candidate best = {0.0f, -1};
#pragma unroll 4
  for (int64_t first = (part * kSampleThreads + threadIdx.x) * kPhiloxIds; first < p.vocab;
       first += kBlocks * kSampleThreads * kPhiloxIds) {
    const Candidate candidate = best_of_four(logits, first, p.vocab, noise);
    if (is_better(candidate, best)) best = candidate;
  }
  best = block_best(best, shared);
  if constexpr (kBlocks > 1) best = cluster_best(best, shared);
  if (threadIdx.x != 0 || part != 0) return;
  p.out[r] = best.id;
  if (best.id < 0 && p.row_errors != nullptr) p.row_errors[r] = kRecordNoCandidate;
}

}  // namespace

int apply_token_mask(const ApplyTokenMaskParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  const int64_t chunks = p.vocab > 0 ? ceil_div(p.vocab, kMaskChunk) : 1;  // row_errors is written even for an empty vocabulary
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(apply_token_mask_kernel<T>, p.num_segments * chunks, kMaskThreads, stream, p, chunks);
  });
}

int sample(const SampleParams& p, void* stream) {
  if (p.num_segments == 0) return 0;
  return with_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LaunchShape shape{p.num_segments, kSampleThreads, sizeof(SampleShared)};
    if (!p.fast || !fast_kernels_run()) return launch(sample_kernel<T, 1>, shape, stream, p);
    shape.blocks *= kSampleCluster;
    shape.cluster = kSampleCluster;
    shape.early = true;
    return launch(sample_kernel<T, kSampleCluster>, shape, stream, p);
  });
}

}  // namespace photon::cuda
