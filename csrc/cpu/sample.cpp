// apply_token_mask and sample.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/automaton.h"
#include "common/filter.h"
#include "common/logprobs.h"
#include "common/mask.h"
#include "common/minimum_tokens.h"
#include "common/noise.h"
#include "common/out_record.h"
#include "common/penalties.h"
#include "common/segment.h"
#include "cpu/filter.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd/simd.h"

namespace photon::cpu {
namespace {

constexpr int64_t kVocabBlock = 8192;  // ids per task; a multiple of 32
constexpr float kLargestGumbel =
    17.0f;  // above -log(-log(u)) for the largest u that open_uniform returns, which is 16.64
constexpr float kLowest = -std::numeric_limits<float>::infinity();

template <typename Bits>
void forbid(Bits* logits, const int32_t* mask, int64_t begin, int64_t end, Bits lowest) {
  for (int64_t id = begin; id < end; id += 32) {
    const uint32_t allowed = static_cast<uint32_t>(mask[id >> 5]);
    if (allowed == 0xffffffffu) continue;
    const int64_t count = end - id < 32 ? end - id : 32;
    for (int64_t bit = 0; bit < count; ++bit)
      logits[id + bit] = (allowed >> bit & 1u) != 0 ? logits[id + bit] : lowest;
  }
}

// The bits of -inf.
uint32_t lowest_bits(DType dtype) {
  return dtype == DType::kF32 ? 0xff800000u : dtype == DType::kF16 ? 0xfc00u : 0xff80u;
}

template <typename Params>
void forbid_range(const Params& p, int64_t r, const int32_t* mask, int64_t begin, int64_t end) {
  if (p.dtype == DType::kF32) {
    forbid<uint32_t>(static_cast<uint32_t*>(p.logits) + r * p.logits_stride, mask, begin, end,
                     lowest_bits(p.dtype));
  } else {
    forbid<uint16_t>(static_cast<uint16_t*>(p.logits) + r * p.logits_stride, mask, begin, end,
                     static_cast<uint16_t>(lowest_bits(p.dtype)));
  }
}

// Gumbel-max over `count` ids from `first`: the largest scaled logit + g, the first of equals.
Candidate noisy_argmax(const void* logits, int64_t first, int64_t count, const Noise& noise,
                       DType dtype) {
  constexpr int64_t kPiece = 256;
  const SimdKernels& kernels = simd();
  Candidate best = {kLowest, -1};
  float values[kPiece];
  for (int64_t at = 0; at < count; at += kPiece) {
    const int64_t size = count - at < kPiece ? count - at : kPiece;
    kernels.to_float(values, static_cast<const char*>(logits) + at * size_of(dtype), size, dtype);
    for (int64_t i = 0; i < size; ++i) {
      if (!(values[i] > kLowest)) continue;
      const float scaled = noise.scaled(values[i]);
      if (best.id >= 0 && scaled + kLargestGumbel < best.value)
        continue;  // no noise can lift it to the top
      const int32_t id = static_cast<int32_t>(first + at + i);
      const float value = noise.noised(noise.scaled(values[i]), id);
      if (best.id < 0 || value > best.value) best = {value, id};
    }
  }
  return best;
}

Candidate sample_range(const SampleParams& p, int64_t r, int64_t begin, int64_t end) {
  const char* logits =
      static_cast<const char*>(p.logits) + (r * p.logits_stride + begin) * size_of(p.dtype);
  const Noise noise = load_noise(load_segment(p.segments, r), p.row_state);
  if (!noise.greedy()) return noisy_argmax(logits, begin, end - begin, noise, p.dtype);
  Candidate found = simd().argmax(logits, end - begin, p.dtype);
  if (found.id >= 0) found.id += static_cast<int32_t>(begin);
  return found;
}

Automaton automaton_of(const SampleParams& p, int64_t r) {
  return load_automaton(p.automata, p.row_state, load_segment(p.segments, r).row,
                        (p.vocab + 31) / 32);
}

bool is_due(const SampleParams& p, int64_t r) {
  return (p.row_errors == nullptr || p.row_errors[r] == 0) &&
         is_sampled(load_segment(p.segments, r), p.row_state, p.rows) &&
         !automaton_of(p, r).is_error;
}

// Of a segment that is due.
bool is_filtered(const SampleParams& p, int64_t r) {
  const Segment s = load_segment(p.segments, r);
  return !load_noise(s, p.row_state).greedy() && load_filter(s, p.row_state).on();
}

// One thread takes the whole of a row that is due.
bool is_whole(const SampleParams& p, int64_t r) {
  return is_filtered(p, r) || load_adjustment(p, load_segment(p.segments, r).row).on();
}

// What is sampled of a logit of segment r, scaled as the row asks.
float processed(const SampleParams& p, int64_t r, float logit, int32_t id) {
  const Segment s = load_segment(p.segments, r);
  const Noise noise = load_noise(s, p.row_state);
  const float score = load_adjustment(p, s.row).adjusted(logit, id);
  return noise.greedy() ? score : noise.scaled(score);
}

int32_t whole_token(const SampleParams& p, int64_t r) {
  thread_local std::vector<float> logits;
  SampleParams own = p;
  const Adjustment adjustment = load_adjustment(p, load_segment(p.segments, r).row);
  if (adjustment.on()) {
    logits.resize(static_cast<size_t>(p.vocab));
    const int64_t begin = r * p.logits_stride * size_of(p.dtype);
    simd().to_float(logits.data(), static_cast<const char*>(p.logits) + begin, p.vocab, p.dtype);
    for (int32_t id = 0; id < p.vocab; ++id) {
      float& logit = logits[static_cast<size_t>(id)];
      logit = adjustment.adjusted(logit, id);
    }
    own.logits = logits.data();
    own.logits_stride = 0;
    own.dtype = DType::kF32;
  }
  return is_filtered(p, r) ? filtered_token(own, r) : sample_range(own, r, 0, p.vocab).id;
}

// Leaves the log of the sum of exponentials in the place of the sampled id's log-probability, which
// is known last.
void put_top_logprobs(const SampleParams& p, int64_t r, const Logprobs& logprobs) {
  thread_local std::vector<float> logits;
  thread_local std::vector<int32_t> ids;
  logits.resize(static_cast<size_t>(p.vocab));
  const int64_t begin = r * p.logits_stride * size_of(p.dtype);
  simd().to_float(logits.data(), static_cast<const char*>(p.logits) + begin, p.vocab, p.dtype);
  const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
  if (logprobs.processed)
    for (int32_t id = 0; id < p.vocab; ++id)
      logits[static_cast<size_t>(id)] = processed(p, r, logit(id), id);
  ids.clear();
  for (int32_t id = 0; id < p.vocab; ++id)
    if (logit(id) > kLowest) ids.push_back(id);
  const size_t count = std::min(ids.size(), static_cast<size_t>(std::max(logprobs.top, 1)));
  std::partial_sort(
      ids.begin(), ids.begin() + static_cast<int64_t>(count), ids.end(),
      [&](int32_t a, int32_t b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
  const float top = ids.empty() ? kLowest : logit(ids[0]);
  double sum = 0.0;
  for (const int32_t id : ids) sum += std::exp(static_cast<double>(logit(id)) - top);
  const float log_sum = top + static_cast<float>(std::log(sum));
  logprobs.put(kLogprobSampled, log_sum);
  for (int32_t i = 0; i < logprobs.top; ++i) {
    const bool is_there = static_cast<size_t>(i) < ids.size();
    const int32_t id = is_there ? ids[static_cast<size_t>(i)] : -1;
    logprobs.put_top(i, id, is_there ? logit(id) - log_sum : kLowest);
  }
}

// Of all rows that ask for these; where none does, no thread wakes up.
void put_all_top_logprobs(const SampleParams& p, bool processed) {
  const auto asked = [&](int64_t r) {
    const Logprobs none{nullptr, 0, false};
    if (!is_due(p, r)) return none;
    const Logprobs found = load_logprobs(p, r, load_segment(p.segments, r));
    return found.processed == processed ? found : none;
  };
  int64_t asking = 0;
  for (int64_t r = 0; r < p.num_segments; ++r) asking += asked(r).out != nullptr;
  if (asking == 0) return;
  parallel_for(p.num_segments, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const Logprobs logprobs = asked(r);
      if (logprobs.out != nullptr) put_top_logprobs(p, r, logprobs);
    }
  });
}

void put_sampled_logprob(const SampleParams& p, int64_t r, const Logprobs& logprobs) {
  float logit, log_sum;
  const int64_t at = (r * p.logits_stride + p.out[r]) * size_of(p.dtype);
  simd().to_float(&logit, static_cast<const char*>(p.logits) + at, 1, p.dtype);
  if (logprobs.processed) logit = processed(p, r, logit, p.out[r]);
  memcpy(&log_sum, logprobs.out + kLogprobSampled, sizeof(log_sum));
  logprobs.put(kLogprobSampled, logit - log_sum);
}

void suppress_stops(const SampleParams& p, int64_t r) {
  const Segment s = load_segment(p.segments, r);
  const int32_t* ids = row_words(p.stop_ids, s.row);
  const int64_t count = num_suppressed_stops(p, s);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= p.vocab) continue;
    const int64_t at = r * p.logits_stride + ids[i];
    if (p.dtype == DType::kF32)
      static_cast<uint32_t*>(p.logits)[at] = lowest_bits(p.dtype);
    else
      static_cast<uint16_t*>(p.logits)[at] = static_cast<uint16_t>(lowest_bits(p.dtype));
  }
}

// Blocks come in the order of their ids: of equals the first stays.
int32_t best_of(const Candidate* blocks, int64_t count) {
  Candidate best = {kLowest, -1};
  for (int64_t b = 0; b < count; ++b) {
    if (blocks[b].id >= 0 && (best.id < 0 || blocks[b].value > best.value)) best = blocks[b];
  }
  return best.id;
}

// Calls body(segment, begin, end) for every block of the vocabulary of every segment.
template <typename Body>
void for_vocab_blocks(int64_t num_segments, int64_t vocab, const Body& body) {
  const int64_t blocks = (vocab + kVocabBlock - 1) / kVocabBlock;
  // fewer ids than a block has are not worth the wake-up of a thread
  const int64_t grain = vocab > 0 && vocab < kVocabBlock ? kVocabBlock / vocab : 1;
  parallel_for(num_segments * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % blocks * kVocabBlock;
      body(task / blocks, begin, begin + kVocabBlock < vocab ? begin + kVocabBlock : vocab);
    }
  });
}

// Forbids what the states of rows with an automaton do not allow; where there is none, no thread
// wakes up.
void apply_automata(const SampleParams& p) {
  const auto mask_of = [&](int64_t r) -> const int32_t* {
    if (!is_due(p, r)) return nullptr;
    const Automaton automaton = automaton_of(p, r);
    return automaton.words != nullptr ? automaton.mask() : nullptr;
  };
  int64_t masks = 0;
  for (int64_t r = 0; r < p.num_segments; ++r) masks += mask_of(r) != nullptr;
  if (masks == 0) return;
  for_vocab_blocks(p.num_segments, p.vocab, [&](int64_t r, int64_t begin, int64_t end) {
    if (const int32_t* const mask = mask_of(r)) forbid_range(p, r, mask, begin, end);
  });
}

}  // namespace

void apply_token_mask(const ApplyTokenMaskParams& p) {
  for (int64_t r = 0; r < p.num_segments; ++r) p.row_errors[r] = judge_mask(p, r).error;
  for_vocab_blocks(p.num_segments, p.vocab, [&](int64_t r, int64_t begin, int64_t end) {
    const int32_t* mask = judge_mask(p, r).mask;
    if (mask != nullptr) forbid_range(p, r, mask, begin, end);
  });
}

void sample(const SampleParams& p) {
  const int64_t blocks = (p.vocab + kVocabBlock - 1) / kVocabBlock;
  thread_local std::vector<Candidate> found;  // [num_segments, blocks]
  if (static_cast<int64_t>(found.size()) < p.num_segments * blocks)
    found.resize(static_cast<size_t>(p.num_segments * blocks));
  Candidate* const candidates = found.data();
  apply_automata(p);
  put_all_top_logprobs(p, false);
  for (int64_t r = 0; r < p.num_segments; ++r) {
    if (is_due(p, r)) suppress_stops(p, r);
  }
  put_all_top_logprobs(p, true);
  for_vocab_blocks(p.num_segments, p.vocab, [&](int64_t r, int64_t begin, int64_t end) {
    if (is_due(p, r) && !is_whole(p, r))
      candidates[r * blocks + begin / kVocabBlock] = sample_range(p, r, begin, end);
  });
  parallel_for(p.num_segments, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      p.out[r] = !is_due(p, r)    ? -1
                 : is_whole(p, r) ? whole_token(p, r)
                                  : best_of(candidates + r * blocks, blocks);
    }
  });
  for (int64_t r = 0; r < p.num_segments; ++r) {
    if (!is_due(p, r)) continue;
    const Logprobs logprobs = load_logprobs(p, r, load_segment(p.segments, r));
    if (p.out[r] >= 0 && logprobs.out != nullptr) put_sampled_logprob(p, r, logprobs);
    if (p.out[r] < 0 && p.row_errors != nullptr) p.row_errors[r] |= kRecordNoCandidate;
  }
}

}  // namespace photon::cpu
