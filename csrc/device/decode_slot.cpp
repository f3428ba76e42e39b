#include "device/decode_slot.h"

#include <exception>
#include <stdexcept>

#include "device/text.h"

namespace photon::device {

namespace {

void check_config(const DecodeSlotConfig& config) {
  if (!config.compute || !config.in_copy || !config.out_copy)
    throw std::invalid_argument("DecodeSlot: compute, in_copy and out_copy are needed");
  for (const auto* stream : {&config.in_copy, &config.out_copy}) {
    if ((*stream)->backend() != config.compute->backend() ||
        (*stream)->device() != config.compute->device()) {
      throw std::invalid_argument(text(
          "DecodeSlot: the compute stream is of backend '", backend_name(config.compute->backend()),
          "', device ", config.compute->device(), ", a copy stream of backend '",
          backend_name((*stream)->backend()), "', device ", (*stream)->device()));
    }
  }
  if (!config.input.host || !config.output.host)
    throw std::invalid_argument("DecodeSlot: an input and an output buffer are needed");
  for (const Transfer* transfer : {&config.input, &config.output, &config.mask}) {
    if (!transfer->host) continue;
    if ((transfer->host->backend() == Backend::kCuda) !=
        (config.compute->backend() == Backend::kCuda)) {
      throw std::invalid_argument(
          text("DecodeSlot: a buffer is of backend '", backend_name(transfer->host->backend()),
               "', the streams of '", backend_name(config.compute->backend()), "'"));
    }
    config.compute->check_copy(
        transfer->device,
        transfer->host->data());  // once: the copies of a step trust these addresses
  }
}

std::shared_ptr<Event> make_event(const DecodeSlotConfig& config, bool timing, bool blocking) {
  return create_event(config.compute->backend(), timing, blocking, config.compute->device());
}

DecodeSlotConfig checked(DecodeSlotConfig config) {
  check_config(config);
  return config;
}

}  // namespace

DecodeSlot::DecodeSlot(DecodeSlotConfig config)
    : config_(checked(std::move(config))),
      copied_in_(make_event(config_, false, true)),
      outputs_written_(make_event(config_, false, true)),
      copied_out_(make_event(config_, false, config_.blocking)) {
  if (!config_.timing) return;
  for (Span& span : spans_)
    span = {make_event(config_, true, true), make_event(config_, true, true)};
}

DecodeSlot::~DecodeSlot() {
  if (launches_ == 0) return;
  for (const auto& stream : {config_.in_copy, config_.compute, config_.out_copy}) {
    try {
      stream->synchronize();
    } catch (const std::exception&) {
      // Reported to whoever waited for the step; here only the end of the work matters.
    }
  }
}

void DecodeSlot::launch(const std::shared_ptr<Graph>& graph, int64_t input_words, bool finish,
                        int64_t output_words) {
  require_launchable("launch");
  check_words("launch", "input_words", input_words, config_.input, "input");
  check_words("launch", "output_words", output_words, config_.output, "output");
  if (!graph)
    throw std::invalid_argument(
        "DecodeSlot.launch: graph is None; without a graph use begin and end");
  start(input_words);
  config_.compute->launch(graph);
  if (finish) finish_outputs(output_words);
  phase_ = finish ? Phase::kFinished : Phase::kForward;
}

void DecodeSlot::begin(int64_t input_words) {
  require_launchable("begin");
  check_words("begin", "input_words", input_words, config_.input, "input");
  start(input_words);
  phase_ = Phase::kOpen;
}

void DecodeSlot::end(int64_t output_words, bool finish) {
  if (phase_ != Phase::kOpen) throw std::runtime_error("DecodeSlot.end: there was no begin");
  check_words("end", "output_words", output_words, config_.output, "output");
  phase_ = Phase::kIdle;
  if (finish) finish_outputs(output_words);
  phase_ = finish ? Phase::kFinished : Phase::kForward;
}

void DecodeSlot::finalize(const std::shared_ptr<Graph>& graph, int64_t mask_words,
                          int64_t output_words) {
  require_finalizable("finalize", mask_words);
  check_words("finalize", "output_words", output_words, config_.output, "output");
  phase_ = Phase::kIdle;
  copy_in(config_.mask, mask_words);
  if (graph) config_.compute->launch(graph);
  finish_outputs(output_words);
  phase_ = Phase::kFinished;
}

void DecodeSlot::begin_finalize(int64_t mask_words) {
  require_finalizable("begin_finalize", mask_words);
  phase_ = Phase::kIdle;
  copy_in(config_.mask, mask_words);
  phase_ = Phase::kOpen;
}

void DecodeSlot::wait() {
  if (phase_ != Phase::kFinished) {
    throw std::runtime_error(
        phase_ == Phase::kIdle
            ? "DecodeSlot.wait: nothing was launched"
            : "DecodeSlot.wait: the launch is not finished; call end or finalize first");
  }
  copied_out_->synchronize();
}

bool DecodeSlot::done() { return phase_ == Phase::kFinished && copied_out_->query(); }

Span DecodeSlot::span() const {
  if (!config_.timing)
    throw std::runtime_error(
        "DecodeSlot.span: the slot was created without timing; pass timing=True");
  if (launches_ == 0) throw std::runtime_error("DecodeSlot.span: nothing was launched");
  return spans_[launches_ % 2];
}

void DecodeSlot::require_launchable(const char* call) const {
  if (phase_ == Phase::kOpen)
    throw std::runtime_error(text("DecodeSlot.", call, ": a begin has no end yet"));
  if (phase_ == Phase::kForward) {
    throw std::runtime_error(
        text("DecodeSlot.", call, ": the previous launch (finish=False) was not finalized"));
  }
}

void DecodeSlot::require_finalizable(const char* call, int64_t mask_words) const {
  if (phase_ != Phase::kForward) {
    throw std::runtime_error(
        text("DecodeSlot.", call, ": there is no launch or end with finish=False to finalize"));
  }
  check_words(call, "mask_words", mask_words, config_.mask, "mask");
}

void DecodeSlot::check_words(const char* call, const char* name, int64_t words,
                             const Transfer& transfer, const char* buffer) const {
  if (words >= 0 && words <= transfer.words()) return;
  throw std::invalid_argument(text("DecodeSlot.", call, ": ", name, " is ", words, ", the ", buffer,
                                   " buffer holds ", transfer.words(),
                                   " words; make it larger or send fewer"));
}

// From here to the end of the call the phase is kIdle, so that a call that fails half-way is not
// waited for.
void DecodeSlot::start(int64_t input_words) {
  phase_ = Phase::kIdle;
  copy_in(config_.input, input_words);
  ++launches_;
  if (config_.timing) config_.compute->record(spans_[launches_ % 2].first);
}

void DecodeSlot::finish_outputs(int64_t output_words) {
  if (config_.timing) config_.compute->record(spans_[launches_ % 2].second);
  config_.compute->record(outputs_written_);
  config_.out_copy->wait(outputs_written_);
  if (output_words > 0)
    config_.out_copy->copy(config_.output.host->data(), config_.output.device,
                           output_words * sizeof(int32_t));
  config_.out_copy->record(copied_out_);
}

// Nothing to send: no copy, no event, no wait. A quiet step costs no host-to-device byte.
void DecodeSlot::copy_in(const Transfer& transfer, int64_t words) {
  if (words == 0) return;
  config_.in_copy->copy(transfer.device, transfer.host->data(), words * sizeof(int32_t));
  config_.in_copy->record(copied_in_);
  config_.compute->wait(copied_in_);
}

}  // namespace photon::device
