// DecodeSlot: one of the ping-pong slots. It owns no decisions: a step is one call that enqueues
// everything the step needs, in order, and one wait for its results. Which slot is free, and what a
// step contains, is the Pipeline's business.
//
//   in_copy   [input]-copied_in-.               [masks]-copied_in-.
//   compute                     '-> forward graph                 '-> sampling -outputs_written-.
//   out_copy                                                                  [output] <--------'
//                                                                     copied_out -> wait()
// Without a late sampling the forward graph's launch writes the outputs itself (finish = true) and
// finalize is not called.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "device/device.h"

namespace photon::device {

// A pinned buffer and the device memory (the caller's) that it is copied to or from. Words are
// int32.
struct Transfer {
  std::shared_ptr<PinnedBuffer> host;  // null: the slot has none
  void* device = nullptr;
  int64_t words() const { return host ? static_cast<int64_t>(host->bytes() / sizeof(int32_t)) : 0; }
};

struct DecodeSlotConfig {
  std::shared_ptr<Stream> compute, in_copy, out_copy;
  Transfer input, output, mask;
  bool timing = false;
  bool blocking = true;  // wait() spins for a while, then sleeps; else it spins on
};

using Span = std::pair<std::shared_ptr<Event>, std::shared_ptr<Event>>;

class DecodeSlot {
 public:
  explicit DecodeSlot(DecodeSlotConfig config);
  ~DecodeSlot();  // waits for the copies that use its buffers
  DecodeSlot(const DecodeSlot&) = delete;
  DecodeSlot& operator=(const DecodeSlot&) = delete;

  // The forward as a graph. finish: the graph also writes the outputs, which are copied out;
  // otherwise finalize() follows.
  void launch(const std::shared_ptr<Graph>& graph, int64_t input_words, bool finish,
              int64_t output_words);

  // The forward as kernels that the caller enqueues on the compute stream between the two.
  void begin(int64_t input_words);
  void end(int64_t output_words, bool finish);

  // The late sampling of a launch without finish. graph may be null where there is nothing to
  // sample.
  void finalize(const std::shared_ptr<Graph>& graph, int64_t mask_words, int64_t output_words);

  // The late sampling as kernels that the caller enqueues on the compute stream between this and
  // end().
  void begin_finalize(int64_t mask_words);

  // The step's only blocking wait: the outputs are in pinned memory. Raises what a worker or the
  // device reported.
  void wait();
  bool done();

  // The first and last moment of the most recent launch on the compute stream; the previous
  // launch's pair stays valid.
  Span span() const;

  const DecodeSlotConfig& config() const { return config_; }

 private:
  enum class Phase {
    kIdle,      // nothing was launched yet, or a call failed half-way
    kOpen,      // between begin, or begin_finalize, and end
    kForward,   // launched without finish: finalize is due
    kFinished,  // outputs are on their way, or there
  };

  void require_launchable(const char* call) const;
  void require_finalizable(const char* call, int64_t mask_words) const;
  void check_words(const char* call, const char* name, int64_t words, const Transfer& transfer,
                   const char* buffer) const;
  void start(int64_t input_words);
  void finish_outputs(int64_t output_words);
  void copy_in(const Transfer& transfer, int64_t words);

  const DecodeSlotConfig config_;
  const std::shared_ptr<Event> copied_in_, outputs_written_, copied_out_;
  std::array<Span, 2> spans_;
  int64_t launches_ = 0;
  Phase phase_ = Phase::kIdle;
};

}  // namespace photon::device
