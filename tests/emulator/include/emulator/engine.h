// What the stand-ins for CUDA's headers ask of the engine (tests/emulator/engine). Every function
// that may wait takes the place in the source it was called from, so that an error can say where
// each thread was.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

struct CUtensorMap;

namespace emulator {

struct Site {
  const char* file;
  int line;
};

constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

// --- what a thread may call ----------------------------------------------------------------------

[[noreturn]] void fail(const std::string& message);  // ends the launch with this error

unsigned lane();
unsigned cluster_rank();
unsigned char* dynamic_shared();

// A place where any other thread may go on first: with a random order it sometimes does.
void may_switch();

// Waits until every lane of `mask` has called the same at the same place. The last one to come runs
// `complete` for all, with what each lane brought (null for lanes outside the mask).
using Complete = void (*)(unsigned mask, void* const* payloads);
void collective(const char* name, unsigned mask, void* payload, Complete complete, Site site);

constexpr int kWholeBlock = 0;
void sync_block(const char* name, int number, int threads,
                Site site);  // threads: how many, or kWholeBlock
void sync_cluster(Site site);
void enter_cluster(const char* name, Site site);  // or leave_cluster()
void meet_cluster(Site site);
void store_in_block(void* pointer, unsigned rank, const void* value, size_t bytes, Site site);
void load_from_block(void* value, const void* pointer, unsigned rank, size_t bytes, Site site);
void send_to_block(float* pointer, unsigned rank, const float (&values)[2], uint64_t* barrier,
                   Site site);

void init_barrier(uint64_t* barrier, uint32_t arrivals, Site site);
void fence_barriers();
void arrive(uint64_t* barrier, uint32_t expected_bytes, Site site);
void arrive_in_block(uint64_t* barrier, unsigned rank, Site site);
void wait_barrier(uint64_t* barrier, uint32_t parity, Site site);

void tensor_copy(void* shared, const CUtensorMap* map, const int (&begin)[3], uint64_t* barrier,
                 Site site);
// To the same place in every block of the cluster whose bit is set.
void tensor_copy_to(unsigned ranks, void* shared, const CUtensorMap* map, const int (&begin)[3],
                    uint64_t* barrier, Site site);
void check_tensor_map(const CUtensorMap* map, const char* name, Site site);
void async_copy(void* shared, const void* global, size_t bytes, bool valid, Site site);
void commit_copies();
void wait_copies(unsigned pending);

void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site);
void multiply_f16(float* d, const uint32_t* a, const uint32_t* b, Site site);
void load_matrices(uint32_t* registers, const void* row, bool transposed, Site site);
uint32_t transpose_matrix(uint32_t rows, Site site);

void let_next_start();
void wait_for_earlier();

// --- what a launch needs -------------------------------------------------------------------------

struct Extent {
  unsigned x, y, z;
};

struct Launch {
  Extent grid, block;
  size_t shared_bytes;
  unsigned cluster;
  bool pdl;
  const void* kernel;
  const char* signature;  // the kernel's parameters, for messages
  void (*run)(const void* args);
  const void* args;
};

// Runs the whole grid. Returns false, and the message in `error`, if the kernel did what it may
// not.
bool run_grid(const Launch& launch, std::string& error);

}  // namespace emulator
