// How much shared memory the kernels of a decode step ask for, so that each SM gets one CTA of
// the next kernel while CTAs of the one before are still there.
//
// A kernel that is launched under pdl has a CTA for each SM, and they go wherever there is room.
// Were there room for two, some SMs would get two and others none, and the step would wait for
// those that got two. So a linear that adds to the residual stream has larger CTAs, of which an SM
// never holds two; it may follow attention, whose CTAs end one by one and need not be on every SM.
// All others have smaller CTAs, of which an SM holds one beside a larger one, or two; they follow a
// kernel that has a CTA on each. Some linears for many tokens have an SM alone, or two CTAs on
// it. So have those of weights of fewer bits; with 17 to 64 tokens and a fixed order of summation
// they leave room for the small CTAs that prepare x.
#pragma once

namespace photon::cuda {

constexpr int kSmBytes = 228 * 1024,
              kReservedBytes = 1024;  // of shared memory; of it, for the system, in each CTA
constexpr int kSmallerBlock = 112 * 1024, kLargerBlock = 114 * 1024, kOnlyBlock = 227 * 1024;

static_assert(kSmallerBlock + kLargerBlock + 2 * kReservedBytes == kSmBytes &&
              kOnlyBlock + kReservedBytes == kSmBytes);

}  // namespace photon::cuda
