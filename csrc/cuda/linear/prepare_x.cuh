// x for all CTAs of a linear of stored weights for more tokens (mid_stored.cuh): normalized but for
// the root mean square, and in the order in which weights are decoded. A warp has eight tokens, and
// of each K chunk one position, as a warp of the narrow linears (narrow_x.cuh).
#pragma once
#include "cuda/linear/narrow_x.cuh"

namespace photon::cuda::stream_linear {

// In a linear's workspace, of up to 64 tokens: what depends on the number of tokens is padded to
// eights of them.
struct PreparedX {
  uint32_t* numbers;  // [tokens, k / 2]: pairs of bfloat16 for int4, else of float16
  float* of_x;  // [k / 128][Load::kXRows][pitch]: sums by groups for int4; for others what a part
                // of a token is to be multiplied by
  float* squares;  // [positions][pitch]: sums, where x is normalized
  int pitch;
};

struct PrepareParams {
  const Bf16 *x, *gain;
  const int32_t* counts;
  PreparedX to;
  int x_stride, first_token, tokens, k;
  int token_tiles, splits;  // splits: warps that share the K chunks of a position
};

template <typename Load, bool kNormalizes>
struct XWriter {
  static constexpr int kColumns = Load::kColumns;
  using Block = narrow::XBlock<Load, 1>;

  const PrepareParams& p;
  int first_token, group, thread;

  __device__ void load(Block& x, int block, bool is_active) const {
    const Bf16* const from = p.x + static_cast<int64_t>(first_token + group) * p.x_stride +
                             block * kColumns + thread * narrow::kLaneColumns;
    const bool is_there = is_active && block * kColumns < p.k;
#pragma unroll
    for (int h = 0; h < Block::kVectors; ++h) x.v[0][h] = narrow::load_x(is_there, from + h * 32);
  }

  __device__ const unsigned char* gains(int block) const {
    return reinterpret_cast<const unsigned char*>(p.gain + block * kColumns +
                                                  thread * narrow::kLaneColumns);
  }

  // An instruction's 16 columns are two vectors in a row: of the first word of each lane, and of
  // the second.
  __device__ void put(const Block& x, int block, bool is_active) const {
    uint32_t* const row = p.to.numbers + static_cast<int64_t>(first_token + group) * (p.k / 2) +
                          block * (kColumns / 2) + thread;
    if (!is_active) return;
#pragma unroll
    for (int h = 0; h < Block::kVectors; ++h) {
      row[h * 16] = x.v[0][h].x;
      row[h * 16 + 4] = x.v[0][h].y;
      row[h * 16 + 8] = x.v[0][h].z;
      row[h * 16 + 12] = x.v[0][h].w;
    }
  }

  __device__ void put_of_x(const narrow::XPreparer<Load, 1, kNormalizes>& prepared,
                           int block) const {
    if (group > 0) return;
    float* const to = p.to.of_x + static_cast<int64_t>(block) * Load::kXRows * p.to.pitch +
                      first_token + thread * 2;
#pragma unroll
    for (int i = 0; i < Load::kXRows; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        to[i * p.to.pitch + j] = Load::kIsF16 ? prepared.scales[0][j] : prepared.sums[i][0][j];
    }
  }
};

template <typename Load, bool kNormalizes>
__device__ void prepare_x(const PrepareParams& p) {
  let_next_start();
  const int counts = p.counts != nullptr ? max(load_fresh(p.counts), 0) - p.first_token : p.tokens,
            active = min(counts, p.tokens);
  const int position = static_cast<int>(blockIdx.x) % kKBlocks,
            tile = static_cast<int>(blockIdx.x) / kKBlocks % p.token_tiles,
            split = static_cast<int>(blockIdx.x) / kKBlocks / p.token_tiles,
            lane = static_cast<int>(threadIdx.x);
  const XWriter<Load, kNormalizes> writer{p, tile * kTokenTile, lane / 4, lane % 4};
  const bool is_active = writer.first_token + writer.group < active;
  wait_for_earlier();
  if (writer.first_token >= active) return;
  narrow::XPreparer<Load, 1, kNormalizes> prepared;
  prepared.clear();
  int block = position + split * kKBlocks;
  const int step = p.splits * kKBlocks;
  typename XWriter<Load, kNormalizes>::Block x, next;
  writer.load(next, block, is_active);
#pragma unroll 1
  for (; block * Load::kColumns < p.k; block += step) {
    x = next;
    writer.load(next, block + step, is_active);
    prepared.prepare(x, writer.gains(block), true);
    writer.put(x, block, is_active);
    writer.put_of_x(prepared, block);
  }
  if (kNormalizes && writer.group / 2 == writer.thread) {
    p.to.squares[position * p.to.pitch + writer.first_token + writer.group] =
        writer.group % 2 == 0 ? prepared.squares[0][0] : prepared.squares[0][1];
  }
}

}  // namespace photon::cuda::stream_linear
