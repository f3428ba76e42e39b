// Warp intrinsics, block barriers, fences and atomics.
#pragma once
#include <cstring>
#include <type_traits>

#include "emulator/engine.h"

namespace emulator {

struct ShuffleLane {
  unsigned char value[8];
  unsigned source;
  const char* name;
};

inline void complete_shuffle(unsigned mask, void* const* payloads) {
  unsigned char values[32][8];
  for (unsigned bits = mask; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    std::memcpy(values[lane], static_cast<const ShuffleLane*>(payloads[lane])->value, 8);
  }
  for (unsigned bits = mask; bits != 0; bits &= bits - 1) {
    ShuffleLane& own = *static_cast<ShuffleLane*>(payloads[__builtin_ctz(bits)]);
    if ((mask >> own.source & 1u) == 0)
      fail(std::string(own.name) + ": a lane reads from one that is not in the mask");
    std::memcpy(own.value, values[own.source], 8);
  }
}

template <typename T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "what a shuffle can carry");
  ShuffleLane lane{{}, source, name};
  std::memcpy(lane.value, &value, sizeof(T));
  collective(name, mask, &lane, complete_shuffle, site);
  std::memcpy(&value, lane.value, sizeof(T));
  return value;
}

struct VoteLane {
  unsigned value;
};

enum class Vote { kBallot, kAdd, kMin, kMax, kAnd, kOr, kXor, kSignedMin, kSignedMax };

template <Vote kVote>
void complete_vote(unsigned mask, void* const* payloads) {
  const auto value = [&](int lane) -> unsigned& {
    return static_cast<VoteLane*>(payloads[lane])->value;
  };
  const auto is_less = [](unsigned a, unsigned b) {
    return kVote == Vote::kSignedMin || kVote == Vote::kSignedMax
               ? static_cast<int>(a) < static_cast<int>(b)
               : a < b;
  };
  constexpr bool kIsMin = kVote == Vote::kMin || kVote == Vote::kSignedMin;
  unsigned result = kVote == Vote::kBallot ? 0 : value(__builtin_ctz(mask));
  for (unsigned bits = kVote == Vote::kBallot ? mask : mask & (mask - 1); bits != 0;
       bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    const unsigned v = value(lane);
    if (kVote == Vote::kBallot) {
      result |= v != 0 ? 1u << lane : 0;
    } else if (kVote == Vote::kAdd) {
      result += v;
    } else if (kVote == Vote::kAnd) {
      result &= v;
    } else if (kVote == Vote::kOr) {
      result |= v;
    } else if (kVote == Vote::kXor) {
      result ^= v;
    } else if (is_less(v, result) == kIsMin) {
      result = v;
    }
  }
  for (unsigned bits = mask; bits != 0; bits &= bits - 1) value(__builtin_ctz(bits)) = result;
}

// Each lane gets the lanes that have its value.
inline void complete_match(unsigned mask, void* const* payloads) {
  unsigned values[32] = {};
  for (unsigned bits = mask; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    values[lane] = static_cast<VoteLane*>(payloads[lane])->value;
  }
  for (unsigned bits = mask; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    unsigned same = 0;
    for (int other = 0; other < 32; ++other)
      if ((mask >> other & 1u) != 0 && values[other] == values[lane]) same |= 1u << other;
    static_cast<VoteLane*>(payloads[lane])->value = same;
  }
}

template <Vote kVote>
unsigned vote(const char* name, unsigned mask, unsigned value, Site site) {
  VoteLane lane{value};
  collective(name, mask, &lane, complete_vote<kVote>, site);
  return lane.value;
}

}  // namespace emulator

// --- shuffles: `width` lanes, a power of two, are a segment of their own -------------------------

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emulator::Site site = emulator::here()) {
  const unsigned lane = emulator::lane(), within = static_cast<unsigned>(width) - 1;
  return emulator::shuffle("__shfl_sync", mask, value,
                           (lane & ~within) | (static_cast<unsigned>(source) & within), site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emulator::Site site = emulator::here()) {
  const unsigned lane = emulator::lane(), in_segment = lane & (static_cast<unsigned>(width) - 1);
  return emulator::shuffle("__shfl_up_sync", mask, value, delta <= in_segment ? lane - delta : lane,
                           site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Site site = emulator::here()) {
  const unsigned lane = emulator::lane(), last = lane | (static_cast<unsigned>(width) - 1);
  return emulator::shuffle("__shfl_down_sync", mask, value,
                           delta <= last - lane ? lane + delta : lane, site);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  emulator::Site site = emulator::here()) {
  const unsigned lane = emulator::lane(), last = lane | (static_cast<unsigned>(width) - 1),
                 source = lane ^ static_cast<unsigned>(bits);
  return emulator::shuffle("__shfl_xor_sync", mask, value, source <= last ? source : lane, site);
}

// --- votes and sums ------------------------------------------------------------------------------

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Site site = emulator::here()) {
  return emulator::vote<emulator::Vote::kBallot>("__ballot_sync", mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Site site = emulator::here()) {
  return emulator::vote<emulator::Vote::kBallot>("__any_sync", mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Site site = emulator::here()) {
  return emulator::vote<emulator::Vote::kBallot>("__all_sync", mask, predicate != 0, site) == mask;
}

inline unsigned __match_any_sync(unsigned mask, int value, emulator::Site site = emulator::here()) {
  emulator::VoteLane lane{static_cast<unsigned>(value)};
  emulator::collective("__match_any_sync", mask, &lane, emulator::complete_match, site);
  return lane.value;
}

#define PHOTON_REDUCE(name, T, kVote)                                          \
  inline T __reduce_##name##_sync(unsigned mask, T value,                      \
                                  emulator::Site site = emulator::here()) {    \
    return static_cast<T>(emulator::vote<emulator::Vote::kVote>(               \
        "__reduce_" #name "_sync", mask, static_cast<unsigned>(value), site)); \
  }
PHOTON_REDUCE(add, unsigned, kAdd)
PHOTON_REDUCE(add, int, kAdd)
PHOTON_REDUCE(min, unsigned, kMin)
PHOTON_REDUCE(min, int, kSignedMin)
PHOTON_REDUCE(max, unsigned, kMax)
PHOTON_REDUCE(max, int, kSignedMax)
PHOTON_REDUCE(and, unsigned, kAnd)
PHOTON_REDUCE(or, unsigned, kOr)
PHOTON_REDUCE(xor, unsigned, kXor)
#undef PHOTON_REDUCE

// --- barriers and fences -------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = ~0u, emulator::Site site = emulator::here()) {
  emulator::collective("__syncwarp", mask, nullptr, nullptr, site);
}
inline void __syncthreads(emulator::Site site = emulator::here()) {
  emulator::sync_block("__syncthreads", 0, emulator::kWholeBlock, site);
}
inline void __threadfence() { emulator::may_switch(); }
inline void __threadfence_block() { emulator::may_switch(); }
inline void __threadfence_system() { emulator::may_switch(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap() was called"); }

// --- atomics: one thread runs at a time, so each is the plain operation --------------------------

namespace emulator {

template <typename T>
using Plain = std::common_type_t<T>;  // is not deduced from

template <typename T, typename Operation>
T atomic(T* address, const Operation& operation) {
  may_switch();
  const T old = *address;
  *address = operation(old);
  may_switch();
  return old;
}

}  // namespace emulator

#define PHOTON_ATOMIC(name, expression)                                         \
  template <typename T>                                                         \
  T name(T* address, emulator::Plain<T> value) {                                \
    return emulator::atomic(address, [&](T old) -> T { return (expression); }); \
  }
PHOTON_ATOMIC(atomicAdd, old + value)
PHOTON_ATOMIC(atomicSub, old - value)
PHOTON_ATOMIC(atomicMax, old < value ? value : old)
PHOTON_ATOMIC(atomicMin, value < old ? value : old)
PHOTON_ATOMIC(atomicAnd, old& value)
PHOTON_ATOMIC(atomicOr, old | value)
PHOTON_ATOMIC(atomicXor, old ^ value)
PHOTON_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
PHOTON_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
PHOTON_ATOMIC(atomicExch, (static_cast<void>(old), value))
#undef PHOTON_ATOMIC

template <typename T>
T atomicCAS(T* address, emulator::Plain<T> expected, emulator::Plain<T> value) {
  return emulator::atomic(address, [&](T old) -> T { return old == expected ? value : old; });
}
