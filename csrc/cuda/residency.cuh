// How much shared memory the kernels of a decode step ask for, so that each SM gets one block of
// the next kernel while blocks of the one before are still there.
//
// A kernel that is launched early has a block for each SM, and they go wherever there is room. Were
// there room for two, some SMs would get two and others none, and the step would wait for those
// that got two. So a linear that adds to the residual stream has larger blocks, of which a SM never
// holds two; it may follow attention, whose blocks end one by one and need not be on every SM. All
// others have smaller blocks, of which a SM holds one beside a larger one, or two; they follow a
// kernel that has a block on each. Some linears for many tokens have a SM alone.
#pragma once

namespace photon::cuda {

constexpr int kSmBytes = 228 * 1024,
              kReservedBytes = 1024;  // of shared memory; of it, for the system, in each block
constexpr int kSmallerBlock = 112 * 1024, kLargerBlock = 114 * 1024, kOnlyBlock = 227 * 1024;

static_assert(kSmallerBlock + kLargerBlock + 2 * kReservedBytes == kSmBytes &&
              kOnlyBlock + kReservedBytes == kSmBytes);

}  // namespace photon::cuda
