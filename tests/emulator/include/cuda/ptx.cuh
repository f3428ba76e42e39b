// csrc/cuda/ptx.cuh for the host: the same functions, done by the engine.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "emulator/engine.h"

namespace photon::cuda {

using emulator::Site;

constexpr bool kHopperCode = true;

inline unsigned char* dynamic_shared() { return emulator::dynamic_shared(); }

// --- programmatic dependent launch: kernels run one after another here, see engine/memory.cpp
// -----

inline void let_next_start() { emulator::let_next_start(); }
inline void wait_for_earlier() { emulator::wait_for_earlier(); }

inline int computed_now(int value) { return value; }

template <typename T>
inline const T* computed_now(const T* pointer) {
  return pointer;
}

inline int computed_once(int value) { return value; }

inline uint32_t masked_or(uint32_t bits, uint32_t mask, uint32_t ones) {
  return (bits & mask) | ones;
}

// --- loads past L1: the host's caches are coherent -----------------------------------------------

inline uint4 load_fresh_if(bool valid, const uint4* pointer) {
  return valid ? *pointer : uint4{0, 0, 0, 0};
}
inline int32_t load_fresh(const int32_t* pointer) { return *pointer; }
inline uint4 load_once(const uint4* pointer) { return *pointer; }

// --- one lane of a warp --------------------------------------------------------------------------

inline bool is_elected() { return threadIdx.x % 32 == 0; }

// --- counting blocks -----------------------------------------------------------------------------

inline unsigned count_round(unsigned* counter, unsigned last) { return atomicInc(counter, last); }

// --- barriers in shared memory -------------------------------------------------------------------

using Barrier = uint64_t;

inline void init_barrier(Barrier* barrier, uint32_t arrivals, Site site = emulator::here()) {
  emulator::init_barrier(barrier, arrivals, site);
}
inline void fence_barriers() { emulator::fence_barriers(); }
inline void arrive(Barrier* barrier, uint32_t after = 0, Site site = emulator::here()) {
  emulator::arrive(barrier + after, 0, site);
}
inline void arrive_expecting(Barrier* barrier, uint32_t bytes, Site site = emulator::here()) {
  emulator::arrive(barrier, bytes, site);
}
inline void arrive_in_block(Barrier* barrier, uint32_t rank, uint32_t after,
                            Site site = emulator::here()) {
  emulator::arrive_in_block(barrier + after, rank, site);
}
inline void wait_barrier(Barrier* barrier, uint32_t parity, Site site = emulator::here()) {
  emulator::wait_barrier(barrier, parity, site);
}

inline void sync_threads(int number, int threads, Site site = emulator::here()) {
  __syncwarp(~0u, site);
  emulator::sync_block("sync_threads", number, threads, site);
}

inline void fence_async_shared() {}
inline void fence_async_global() {}

// --- copies into shared memory -------------------------------------------------------------------

inline uint64_t evict_first() { return 0; }
inline uint64_t evict_last() { return 0; }
inline uint64_t evict_normal() { return 0; }

struct TensorPlace {
  int column, row, slice;
};

inline void tensor_copy(void* shared, const CUtensorMap* map, TensorPlace at, Barrier* barrier,
                        uint64_t, Site site = emulator::here()) {
  emulator::tensor_copy(shared, map, {at.column, at.row, at.slice}, barrier, site);
}

inline void tensor_copy_to(uint16_t ranks, void* shared, const CUtensorMap* map, TensorPlace at,
                           Barrier* barrier, uint64_t, Site site = emulator::here()) {
  emulator::tensor_copy_to(ranks, shared, map, {at.column, at.row, at.slice}, barrier, site);
}

inline void prefetch_tensor_map(const CUtensorMap* map, Site site = emulator::here()) {
  emulator::check_tensor_map(map, "prefetch_tensor_map", site);
}

inline void async_copy16(void* shared, const void* global, bool valid,
                         Site site = emulator::here()) {
  emulator::async_copy(shared, global, 16, valid, site);
}

template <int kBytes>
inline void async_copy(void* shared, const void* global, bool valid, Site site = emulator::here()) {
  emulator::async_copy(shared, global, kBytes, valid, site);
}

inline void commit_copies() { emulator::commit_copies(); }

inline void arrive_when_copied(Barrier* barrier, Site site = emulator::here()) {
  emulator::commit_copies();
  emulator::wait_copies(0);
  emulator::arrive(barrier, 0, site);
}

template <int kPending>
inline void wait_copies() {
  static_assert(kPending >= 0);
  emulator::wait_copies(kPending);
}

// --- matrix instructions -------------------------------------------------------------------------

inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                          Site site = emulator::here()) {
  emulator::multiply_bf16(d, a, b, site);
}

inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         Site site = emulator::here()) {
  emulator::multiply_f16(d, a, b, site);
}

inline void load_matrices(uint32_t (&registers)[4], const void* row, Site site = emulator::here()) {
  emulator::load_matrices(registers, row, false, site);
}

inline void load_matrices_transposed(uint32_t (&registers)[4], const void* row,
                                     Site site = emulator::here()) {
  emulator::load_matrices(registers, row, true, site);
}

inline uint32_t transpose_matrix(uint32_t rows, Site site = emulator::here()) {
  return emulator::transpose_matrix(rows, site);
}

inline void extend_bytes(uint32_t (&pairs)[2], uint32_t bytes) {
  const auto extended = [bytes](int i) -> uint32_t {
    return static_cast<uint16_t>(static_cast<int8_t>(bytes >> 8 * i));
  };
  for (int i = 0; i < 2; ++i) pairs[i] = extended(2 * i) | extended(2 * i + 1) << 16;
}

// Their exponents are 8 apart.
inline void halves_of_e4m3(uint32_t (&pairs)[2], uint32_t codes) {
  const auto half = [codes](int i) -> uint32_t {
    const uint32_t code = codes >> 8 * i & 255, sign = (code & 128) << 8;
    if ((code & 127) == 127) return sign | 0x7fff;
    return sign | emulator::float_to_f16(emulator::f16_to_float((code & 127) << 7) * 256.0f);
  };
  for (int i = 0; i < 2; ++i) pairs[i] = half(2 * i) | half(2 * i + 1) << 16;
}

// --- maths ---------------------------------------------------------------------------------------

inline void prefetch_l2(const void*) {}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

// --- clusters ------------------------------------------------------------------------------------

inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline void sync_cluster(Site site = emulator::here()) { emulator::sync_cluster(site); }
inline void enter_cluster(Site site = emulator::here()) {
  emulator::enter_cluster("enter_cluster", site);
}
inline void leave_cluster(Site site = emulator::here()) {
  emulator::enter_cluster("leave_cluster", site);
}
inline void meet_cluster(Site site = emulator::here()) { emulator::meet_cluster(site); }

inline void store_in_block(float* pointer, uint32_t rank, float value,
                           Site site = emulator::here()) {
  emulator::store_in_block(pointer, rank, &value, sizeof(value), site);
}

inline float2 load_from_block(const float2* pointer, uint32_t rank, Site site = emulator::here()) {
  float2 v;
  emulator::load_from_block(&v, pointer, rank, sizeof(v), site);
  return v;
}
inline float4 load_from_block(const float4* pointer, uint32_t rank, Site site = emulator::here()) {
  float4 v;
  emulator::load_from_block(&v, pointer, rank, sizeof(v), site);
  return v;
}

inline void send_to_block(float* pointer, uint32_t rank, float first, float second,
                          Barrier* barrier, Site site = emulator::here()) {
  emulator::send_to_block(pointer, rank, {first, second}, barrier, site);
}

}  // namespace photon::cuda
