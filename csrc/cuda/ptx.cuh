// The instructions that C++ has no words for, one function each, named for what they do. Portable
// kernels that call them are compiled for every architecture; where an instruction is missing
// (below compute capability 9.0) its function traps, and hopper_runs() keeps such a device away
// from it. tests/emulator has the same functions for the host.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace photon::cuda {

// kHopperCode: whether the code being compiled may use what is new in 9.0. The Hopper linears have
// no body elsewhere, and chunk attention no reduction of parts: they would be compiled for nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHopperCode = false;
#define PHOTON_HOPPER(statement) __trap()
#else
constexpr bool kHopperCode = true;
#define PHOTON_HOPPER(statement) statement
#endif

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The CTA's dynamic shared memory, aligned to 1024 bytes: a swizzled tensor copy places vectors
// by their address.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char photon_dynamic_shared[];
  return photon_dynamic_shared;
}

// --- programmatic dependent launch ---------------------------------------------------------------

// Kernels of all devices call both. Below 9.0 no launch is early: nothing is to be let start, nor
// waited for.

// The kernel that follows may start once every CTA of this one has called this, or ended.
__device__ inline void let_next_start() {
  if constexpr (kHopperCode) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when the kernel before this one has ended and its writes are visible. Every kernel of a
// chain calls it before it writes anything, and before it reads what a kernel of the same chain
// writes: then "the one before has ended" means that all earlier ones have.
__device__ inline void wait_for_earlier() {
  if constexpr (kHopperCode) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Computes a value here and not where it is first used: before wait_for_earlier() there is time for
// it.
__device__ inline int computed_now(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <typename T>
__device__ inline const T* computed_now(const T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// The same, and the compiler cannot compute it again where it is used: of a shuffle it knows
// nothing. All lanes of the warp must call it.
__device__ inline int computed_once(int value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x);
}

// (bits & mask) | ones, as one instruction: two constants that the compiler knows would make two.
__device__ inline uint32_t masked_or(uint32_t bits, uint32_t mask, uint32_t ones) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(ones));
  return result;
}

// --- loads past L1, of what other kernels of the chain wrote: this CTA's L1 may hold what was
// there before ---------------------------

// Zeros where not `valid`: without a branch, so that many loads follow each other closely.
__device__ inline uint4 load_fresh_if(bool valid, const uint4* pointer) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 "
      "%2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(pointer), "r"(static_cast<int>(valid))
      : "memory");
  return v;
}

__device__ inline int32_t load_fresh(const int32_t* pointer) {
  int32_t v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

// A load of what nothing reads again: L2 gives it up first.
__device__ inline uint4 load_once(const uint4* pointer) { return __ldcs(pointer); }

// --- one lane of a warp --------------------------------------------------------------------------

// True in one lane of a warp; all lanes must call it. The compiler knows then that what follows is
// done by one lane, and makes no loop over lanes of what it can only do for the warp, tensor copies
// above all.
__device__ inline bool is_elected() {
  uint32_t elected = 0;
  PHOTON_HOPPER(asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected)));
  return elected != 0;
}

// --- counting CTAs -------------------------------------------------------------------------------

// Counts 0, 1, ... last, 0 and so on, and returns what the counter was. The CTA's writes before
// it (and a CTA barrier) are visible to whoever counts later, after a barrier of its own CTA.
__device__ inline unsigned count_round(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// --- barriers in shared memory -------------------------------------------------------------------

using Barrier = uint64_t;

// One thread, before any use; then fence_barriers(), then a CTA (or cluster) barrier.
__device__ inline void init_barrier(Barrier* barrier, uint32_t arrivals) {
  PHOTON_HOPPER(
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                   "r"(arrivals) : "memory"));
}

__device__ inline void fence_barriers() {
  PHOTON_HOPPER(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
}

// Arrives once `after` has a value. Loads from shared memory return later than they are issued, and
// an arrival would overtake them: so `after` is made of what they brought, and-ed with a zero that
// the compiler cannot know. Its value must be 0.
__device__ inline void arrive(Barrier* barrier, uint32_t after = 0) {
  PHOTON_HOPPER(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
      shared_address(barrier) + after) : "memory"));
}

// Arrives, and announces `bytes` that copies will bring before the phase is complete.
__device__ inline void arrive_expecting(Barrier* barrier, uint32_t bytes) {
  PHOTON_HOPPER(asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory"));
}

// Arrives at the barrier that is at the same place in CTA `rank` of the cluster; `after` as
// above.
__device__ inline void arrive_in_block(Barrier* barrier, uint32_t rank, uint32_t after) {
  PHOTON_HOPPER(asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier) + after),
      "r"(rank) : "memory"));
}

// Waits until the phase of this parity is complete. A fresh barrier counts as if the phase of
// parity 1 were.
__device__ inline void wait_barrier(Barrier* barrier, uint32_t parity) {
  PHOTON_HOPPER(
      asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], "
                   "%1;\n@p bra DONE_%=;\nbra WAIT_%=;\n"
                   "DONE_%=:\n}" ::"r"(shared_address(barrier)),
                   "r"(parity) : "memory"));
}

// A barrier of `threads` threads of the CTA, by number; number 0 is __syncthreads().
__device__ inline void sync_threads(int number, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// What this thread wrote to shared memory is seen by copies and by instructions of a warpgroup that
// are started after it; by other threads, after a barrier.
__device__ inline void fence_async_shared() {
  PHOTON_HOPPER(asm volatile("fence.proxy.async.shared::cta;" :: : "memory"));
}

// What this thread knows others to have written to global memory is seen by copies that it starts
// after it.
__device__ inline void fence_async_global() {
  PHOTON_HOPPER(asm volatile("fence.proxy.async.global;" :: : "memory"));
}

// --- copies into shared memory -------------------------------------------------------------------

// How L2 treats what a copy brings: weights are read once a step, so they make room first.
__device__ inline uint64_t evict_first() {
  uint64_t policy = 0;
  PHOTON_HOPPER(
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy)));
  return policy;
}

// The opposite, for what many CTAs read.
__device__ inline uint64_t evict_last() {
  uint64_t policy = 0;
  PHOTON_HOPPER(asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy)));
  return policy;
}

// As L2 treats what has no hint.
__device__ inline uint64_t evict_normal() {
  uint64_t policy = 0;
  PHOTON_HOPPER(
      asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy)));
  return policy;
}

// Where a tensor copy begins: column, row, and slice of columns.
struct TensorPlace {
  int column, row, slice;
};

// One thread: starts a copy of one box of a tensor of three dimensions. A box counts towards
// `barrier` with all its bytes, those outside of the tensor too. The map is a kernel parameter.
__device__ inline void tensor_copy(void* shared, const CUtensorMap* map, TensorPlace at,
                                   Barrier* barrier, uint64_t policy) {
  PHOTON_HOPPER(
      asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::"
                   "bytes.L2::cache_hint"
                   " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
                   "l"(map), "r"(at.column), "r"(at.row), "r"(at.slice),
                   "r"(shared_address(barrier)), "l"(policy) : "memory"));
}

// The same into the shared memory of every CTA of the cluster whose bit is set in `ranks`, at the
// same place, and counted by the barrier at the same place.
__device__ inline void tensor_copy_to(uint16_t ranks, void* shared, const CUtensorMap* map,
                                      TensorPlace at, Barrier* barrier, uint64_t policy) {
  PHOTON_HOPPER(
      asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::"
                   "bytes.multicast::cluster.L2::cache_hint"
                   " [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared_address(shared)),
                   "l"(map), "r"(at.column), "r"(at.row), "r"(at.slice),
                   "r"(shared_address(barrier)), "h"(ranks), "l"(policy) : "memory"));
}

// Starts to bring what is at a global address into L2.
__device__ inline void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// One thread: fetches the map before the first copy needs it.
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  PHOTON_HOPPER(asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"));
}

// This thread: starts a copy of 16 bytes, or writes zeros where not `valid` (`global` must be a
// valid address even then).
__device__ inline void async_copy16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// The same of 4 or 8 bytes.
template <int kBytes>
__device__ inline void async_copy(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? kBytes : 0), "n"(kBytes)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives when all copies that this thread has started have arrived.
__device__ inline void arrive_when_copied(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits until at most kPending of this thread's committed groups are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- matrix instructions: d[16][8] += a[16][16] b[16][8]
// ----------------------------------------------------------------------------- With g = lane / 4,
// t = lane % 4, two bf16 a register, the lower half first: a[0]: a(g, 2t..2t+1), a[1]: a(g + 8,
// 2t..), a[2]: a(g, 2t + 8..), a[3]: a(g + 8, 2t + 8..); b[0]: b(2t..2t+1, g), b[1]: b(2t + 8..,
// g); d[0], d[1]: d(g, 2t..2t+1), d[2], d[3]: d(g + 8, 2t..).

__device__ inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of float16.
__device__ inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8
// of matrix i / 8 (16 bytes, aligned); register j gets row g, elements 2t..2t+1 of matrix j.
__device__ inline void load_matrices(uint32_t (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed: register j gets rows 2t..2t+1, column g of matrix j.
__device__ inline void load_matrices_transposed(uint32_t (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements that the warp has in a register each, row g, elements
// 2t..2t+1: its transpose.
__device__ inline uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// Four signed bytes as 16 bits each: the lower two, the upper two.
__device__ inline void extend_bytes(uint32_t (&pairs)[2], uint32_t bytes) {
  asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(pairs[0]) : "r"(bytes));
  asm("prmt.b32 %0, %1, 0, 0xb3a2;" : "=r"(pairs[1]) : "r"(bytes));
}

// Four e4m3 numbers as float16: the lower two, the upper two.
__device__ inline void halves_of_e4m3(uint32_t (&pairs)[2], uint32_t codes) {
  PHOTON_HOPPER(
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
          "cvt.rn.f16x2.e4m3x2 %1, high;\n}" : "=r"(pairs[0]),
          "=r"(pairs[1]) : "r"(codes)));
}

// --- maths ---------------------------------------------------------------------------------------

// 2^x to about two units in the last place; 2^0 is 1, 2^-inf and what would be subnormal are 0.
__device__ inline float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x to about one unit in the last place; of infinity 0.
__device__ inline float reciprocal_approx(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// --- clusters ------------------------------------------------------------------------------------

__device__ inline uint32_t cluster_rank() {
  uint32_t rank = 0;
  PHOTON_HOPPER(asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)));
  return rank;
}

// A barrier of the cluster's threads, by whole warps; writes to shared memory before it are visible
// after it, the neighbours' included.
__device__ inline void sync_cluster() {
  PHOTON_HOPPER(
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire."
                   "aligned;" :: : "memory"));
}

// The same in two halves. After meet_cluster() all CTAs have called enter_cluster() before it
// (where they need not have written anything but barriers, which are fenced), or leave_cluster()
// (and what they did to their neighbours' shared memory is done).
__device__ inline void enter_cluster() {
  PHOTON_HOPPER(asm volatile("barrier.cluster.arrive.relaxed.aligned;" :: : "memory"));
}
__device__ inline void leave_cluster() {
  PHOTON_HOPPER(asm volatile("barrier.cluster.arrive.release.aligned;" :: : "memory"));
}
__device__ inline void meet_cluster() {
  PHOTON_HOPPER(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory"));
}

// Writes to the place that `pointer` names in the shared memory of CTA `rank` of the cluster.
__device__ inline void store_in_block(float* pointer, uint32_t rank, float value) {
  PHOTON_HOPPER(
      asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, "
                   "%1;\nst.shared::cluster.f32 [remote], %2;\n}" ::"r"(shared_address(pointer)),
                   "r"(rank), "f"(value) : "memory"));
}

// Reads what is at the place that `pointer` names in the shared memory of CTA `rank` of the
// cluster.
__device__ inline float2 load_from_block(const float2* pointer, uint32_t rank) {
  float2 v = {};
  PHOTON_HOPPER(
      asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %2, "
                   "%3;\nld.shared::cluster.v2.f32 {%0,%1}, [remote];\n}" : "=f"(v.x),
                   "=f"(v.y) : "r"(shared_address(pointer)), "r"(rank) : "memory"));
  return v;
}

__device__ inline float4 load_from_block(const float4* pointer, uint32_t rank) {
  float4 v = {};
  PHOTON_HOPPER(asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\nld.shared::cluster.v4.f32 "
      "{%0,%1,%2,%3}, [remote];\n}" : "=f"(v.x),
      "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(pointer)), "r"(rank) : "memory"));
  return v;
}

// Writes two values to the place that `pointer` names in the shared memory of CTA `rank`; their
// eight bytes count towards its `barrier`.
__device__ inline void send_to_block(float* pointer, uint32_t rank, float first, float second,
                                     Barrier* barrier) {
  PHOTON_HOPPER(
      asm volatile("{\n.reg .b32 remote, barrier;\nmapa.shared::cluster.u32 remote, %0, "
                   "%2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                   "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], "
                   "{%3, %4}, [barrier];\n}" ::"r"(shared_address(pointer)),
                   "r"(shared_address(barrier)), "r"(rank), "f"(first), "f"(second) : "memory"));
}

#undef PHOTON_HOPPER

}  // namespace photon::cuda
