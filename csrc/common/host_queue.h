// How a CPU op reaches a host stream: the torch edge calls submit(); if a host stream has claimed
// this thread, the call is enqueued (or recorded, while that stream captures) as a plain function
// and a copy of its params, else it runs here and now. The claim is set by csrc/device through
// photon_ext_set_host_queue, an extern "C" function that the ops library exports.
#pragma once
#include <cstddef>

namespace photon {

using HostKernel = void (*)(const void* params);

struct HostQueue {
  // Copies `bytes` of `params` (trivially copyable) before it returns. `name`, for traces, lives as
  // long as the process; it may be null.
  void (*push)(void* context, HostKernel kernel, const void* params, size_t bytes,
               const char* name);
  void* context;
};

}  // namespace photon

// Claims the calling thread for `queue` (null: releases it) and returns the previous claim. Defined
// in csrc/ops/dispatch.cpp.
extern "C" const photon::HostQueue* photon_ext_set_host_queue(const photon::HostQueue* queue);
