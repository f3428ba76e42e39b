// Claiming a thread: while a CPU stream has claimed it, photon's CPU ops called on that thread are
// enqueued on (or recorded by) the stream.
#pragma once
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"

namespace photon::device {

using SetHostQueue = const HostQueue* (*)(const HostQueue* queue);

// The ops library's photon_ext_set_host_queue; set once, at import.
void bind_ops(SetHostQueue set_host_queue);

// enter() claims, exit() gives back what was claimed before; they nest. On a cuda stream both do
// nothing: ops ask torch for the stream.
class Claim {
 public:
  explicit Claim(std::shared_ptr<Stream> stream);
  void enter();
  void exit();
  const std::shared_ptr<Stream>& stream() const { return stream_; }

 private:
  const std::shared_ptr<Stream> stream_;
  std::vector<std::pair<std::thread::id, const HostQueue*>> previous_;
};

}  // namespace photon::device
