// How much shared memory the kernels of a decode step ask for, so that each multiprocessor gets one block of the next kernel while blocks
// of the one before are still there.
//
// A kernel that is launched early has a block for each multiprocessor, and they go wherever there is room. Were there room for two, some
// multiprocessors would get two and others none, and the step would wait for those that got two. So a linear that adds to the residual
// stream has larger blocks, of which a multiprocessor never holds two; it may follow attention, whose blocks end one by one and need not be
// on every multiprocessor. All others have smaller blocks, of which a multiprocessor holds one beside a larger one, or two; they follow a
// kernel that has a block on each. Some linears for many lines have a multiprocessor alone.
#pragma once

namespace photon::cuda {

constexpr int kMultiprocessorBytes = 228 * 1024, kReservedBytes = 1024;  // of shared memory; of it, for the system, in each block
constexpr int kSmallerBlock = 112 * 1024, kLargerBlock = 114 * 1024, kOnlyBlock = 227 * 1024;

static_assert(kSmallerBlock + kLargerBlock + 2 * kReservedBytes == kMultiprocessorBytes &&
              kOnlyBlock + kReservedBytes == kMultiprocessorBytes);

}  // namespace photon::cuda
