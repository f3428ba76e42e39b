// The cuda backend's factories. Free of CUDA headers; a build without CUDA defines them in
// device.cpp, where each says what is missing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/device.h"

namespace photon::device::cuda {

std::shared_ptr<Stream> create_stream(
    int device);  // cudaStreamNonBlocking: never ordered with the default stream
std::shared_ptr<Stream> wrap_stream(uintptr_t handle, int device);
std::shared_ptr<Event> create_event(bool timing, bool blocking, int device);
std::shared_ptr<PinnedBuffer> create_pinned(size_t bytes);
std::shared_ptr<Graph> graph_from_raw(uintptr_t graph, int device);

}  // namespace photon::device::cuda
