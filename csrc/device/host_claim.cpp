#include "device/host_claim.h"

#include <atomic>
#include <stdexcept>

namespace photon::device {

namespace {
std::atomic<SetHostQueue> set_queue{nullptr};
}

void bind_ops(SetHostQueue set_host_queue) {
  if (set_host_queue == nullptr) throw std::invalid_argument("bind_ops: the address is 0");
  set_queue.store(set_host_queue);
}

Claim::Claim(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

void Claim::enter() {
  if (stream_->queue() == nullptr) return;
  const SetHostQueue set = set_queue.load();
  if (set == nullptr)
    throw std::runtime_error(
        "Stream.claim: the ops library is not bound; import photon_ext, which calls _C.bind_ops");
  previous_.emplace_back(std::this_thread::get_id(), set(stream_->queue()));
}

void Claim::exit() {
  if (stream_->queue() == nullptr) return;
  if (previous_.empty()) throw std::runtime_error("Stream.claim: left without having been entered");
  if (previous_.back().first != std::this_thread::get_id()) {
    throw std::runtime_error(
        "Stream.claim: left on another thread than it was entered on; a claim belongs to one "
        "thread");
  }
  set_queue.load()(previous_.back().second);
  previous_.pop_back();
}

}  // namespace photon::device
