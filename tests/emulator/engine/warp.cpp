// What the lanes of a warp do together.
#include <cstring>

#include "emulator/half_types.h"
#include "machine.h"

namespace emulator {
namespace {

std::string missing_lanes(const void* subject) {
  const Thread& thread = *static_cast<const Thread*>(subject);
  const Warp& warp = *thread.warp;
  for (unsigned i = 0; i < warp.collective_count; ++i) {
    const Collective& one = warp.collectives[i];
    if ((one.arrived >> thread.lane & 1u) != 0)
      return format("of mask 0x%08x, lanes 0x%08x have not come", one.mask,
                    one.mask & ~one.arrived);
  }
  return "";
}

bool same_place(const Site& a, const Site& b) { return a.line == b.line && a.file == b.file; }

[[noreturn]] void refuse_mask(const char* name, unsigned mask, Site site) {
  const Thread& self = *machine.current;
  const std::string call = format("%s calls %s %s with mask 0x%08x, ", thread_name(self).c_str(),
                                  name, at(site).c_str(), mask);
  if ((mask >> self.lane & 1u) == 0) fail(call + "which does not name it");
  fail(call + format("but lanes 0x%08x have ended", mask & (self.warp->ended | ~self.warp->lanes)));
}

Collective& join(Warp& warp, const char* name, unsigned mask, Complete complete, Site site) {
  for (unsigned i = 0; i < warp.collective_count; ++i) {
    Collective& one = warp.collectives[i];
    if (one.mask != mask) continue;
    if (one.complete == complete && same_place(one.site, site)) return one;
    fail(format("lanes of one warp disagree: %s is in %s %s, others of the same mask are in %s %s",
                thread_name(*machine.current).c_str(), name, at(site).c_str(), one.name,
                at(one.site).c_str()));
  }
  Collective& one = warp.collectives[warp.collective_count++];
  one.name = name;
  one.mask = mask;
  one.arrived = 0;
  one.complete = complete;
  one.site = site;
  return one;
}

}  // namespace

unsigned lane() { return machine.current->lane; }

void collective(const char* name, unsigned mask, void* payload, Complete complete, Site site) {
  Thread& self = *machine.current;
  Warp& warp = *self.warp;
  const unsigned bit = 1u << self.lane;
  if ((mask & bit) == 0 || (mask & (warp.ended | ~warp.lanes)) != 0) refuse_mask(name, mask, site);
  Collective& one = join(warp, name, mask, complete, site);
  one.arrived |= bit;
  one.payloads[self.lane] = payload;
  if (one.arrived != mask) return wait_here({name, site, missing_lanes, &self});
  if (complete != nullptr) complete(mask, one.payloads);
  Collective& last = warp.collectives[--warp.collective_count];
  if (&one != &last) one = last;
  if (mask == bit) return;
  make_ready(warp, mask & ~bit);
  give_way();
}

// --- matrix instructions -------------------------------------------------------------------------

namespace {

struct MultiplyLane {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

using FourColumns = double __attribute__((vector_size(32)));

// One rounding of the exact products' sum, which doubles hold nearly exactly; the hardware's own
// order of summing is not documented.
template <float (*kFrom)(uint16_t)>
void complete_multiply(unsigned, void* const* payloads) {
  double a[16][16];
  FourColumns b[2][16], sums[2][16];
  for (int lane = 0; lane < 32; ++lane) {
    const MultiplyLane& own = *static_cast<const MultiplyLane*>(payloads[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half)
        a[g + i % 2 * 8][t + i / 2 * 8 + half] = kFrom(own.a[i] >> half * 16 & 0xffffu);
    }
    for (int i = 0; i < 2; ++i) {
      for (int half = 0; half < 2; ++half)
        b[g / 4][t + i * 8 + half][g % 4] = kFrom(own.b[i] >> half * 16 & 0xffffu);
    }
  }
  for (int row = 0; row < 16; ++row) {
    FourColumns left = {}, right = {};  // in registers
    for (int k = 0; k < 16; ++k) {
      left += a[row][k] * b[0][k];
      right += a[row][k] * b[1][k];
    }
    sums[0][row] = left;
    sums[1][row] = right;
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* d = static_cast<const MultiplyLane*>(payloads[lane])->d;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i)
      d[i] = static_cast<float>(d[i] + sums[t / 4][g + i / 2 * 8][t % 4 + i % 2]);
  }
}

struct MatrixLane {
  uint32_t* registers;
  const void* row;
};

template <bool kTransposed>
void complete_load(unsigned, void* const* payloads) {
  uint16_t matrices[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    std::memcpy(matrices[lane / 8][lane % 8], static_cast<const MatrixLane*>(payloads[lane])->row,
                sizeof(matrices[0][0]));
  }
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t* registers = static_cast<const MatrixLane*>(payloads[lane])->registers;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = kTransposed ? matrices[i][t][g] : matrices[i][g][t];
      const uint32_t high = kTransposed ? matrices[i][t + 1][g] : matrices[i][g][t + 1];
      registers[i] = low | high << 16;
    }
  }
}

struct TransposeLane {
  uint32_t rows, columns;
};

void complete_transpose(unsigned, void* const* payloads) {
  const auto element = [&](int row, int column) {
    const auto* lane = static_cast<const TransposeLane*>(payloads[row * 4 + column / 2]);
    return lane->rows >> column % 2 * 16 & 0xffffu;
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    static_cast<TransposeLane*>(payloads[lane])->columns = element(t, g) | element(t + 1, g) << 16;
  }
}

}  // namespace

void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
  MultiplyLane payload{d, a, b};
  collective("multiply_bf16", ~0u, &payload, complete_multiply<bf16_to_float>, site);
}

void multiply_f16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
  MultiplyLane payload{d, a, b};
  collective("multiply_f16", ~0u, &payload, complete_multiply<f16_to_float>, site);
}

void load_matrices(uint32_t* registers, const void* row, bool transposed, Site site) {
  check_shared(row, 16, 16, "load_matrices", site);
  MatrixLane payload{registers, row};
  collective("load_matrices", ~0u, &payload,
             transposed ? complete_load<true> : complete_load<false>, site);
}

uint32_t transpose_matrix(uint32_t rows, Site site) {
  TransposeLane payload{rows, 0};
  collective("transpose_matrix", ~0u, &payload, complete_transpose, site);
  return payload.columns;
}

}  // namespace emulator
