// How much shared memory the kernels of a decode step ask for, so that each multiprocessor gets one block of the next kernel while blocks
// of the one before are still there.
//
// A kernel that is launched early has as many blocks as there are multiprocessors, and they go wherever there is room. Were there room for
// two, some multiprocessors would get two and others none, and the step would wait for those that got two. So kernels take turns, as the
// ops of a layer do: those that add to the residual stream have larger blocks, of which a multiprocessor never holds two, and the others
// have smaller ones, of which it holds one beside a larger one (or two, where a kernel is made of twice as many).
#pragma once

namespace photon::cuda {

constexpr int kMultiprocessorBytes = 228 * 1024, kReservedBytes = 1024;  // of shared memory; of it, for the system, in each block
constexpr int kSmallerBlock = 112 * 1024, kLargerBlock = 114 * 1024, kOnlyBlock = 227 * 1024;

static_assert(kSmallerBlock + kLargerBlock + 2 * kReservedBytes == kMultiprocessorBytes &&
              kOnlyBlock + kReservedBytes == kMultiprocessorBytes);

}  // namespace photon::cuda
