#include "ops/overlap.h"

#include <algorithm>

namespace photon::ops {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }  // b is positive

}  // namespace

Footprint::Footprint(const int64_t* sizes, const int64_t* strides, int64_t rank,
                     int64_t element_size)
    : run_(element_size) {
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes[i] == 1 || strides[i] == 0) continue;  // it adds no memory
    int64_t place = rank_++;
    for (; place > 0 && dims_[place - 1].stride < strides[i] * element_size; --place)
      dims_[place] = dims_[place - 1];
    dims_[place] = {sizes[i], strides[i] * element_size};
  }
  for (; rank_ > 0 && dims_[rank_ - 1].stride == run_; --rank_) run_ *= dims_[rank_ - 1].size;
  extent_ = run_;
  for (int64_t i = 0; i < rank_; ++i) extent_ += (dims_[i].size - 1) * dims_[i].stride;
}

bool Footprint::overlaps_itself() const {
  int64_t inside = run_;
  for (int64_t i = rank_ - 1; i >= 0; --i) {
    if (dims_[i].stride < inside) return true;
    inside += (dims_[i].size - 1) * dims_[i].stride;
  }
  return false;
}

bool Footprint::overlaps(const Footprint& other, int64_t distance) const {
  return meet({dims_, rank_, extent_}, {other.dims_, other.rank_, other.extent_}, distance);
}

// The number of blocks that repeat by `stride`; this becomes the first of them.
int64_t Footprint::Block::enter(int64_t stride) {
  if (widest() != stride) return 1;
  extent -= (dims->size - 1) * stride;
  --rank;
  return (dims++)->size;
}

// In rows of one stride, row i of a and row j of b are `distance - (i - j) * stride` apart, so i -
// j alone says whether they can meet. Where rows are no longer than the stride, two values of it
// can: b's row begins in one row of a's stride, and ends there or in the next.
bool Footprint::meet(Block a, Block b, int64_t distance) {
  if (distance >= a.extent || -distance >= b.extent) return false;
  const int64_t stride = std::max(a.widest(), b.widest());
  if (stride == 0) return true;
  const int64_t rows_a = a.enter(stride), rows_b = b.enter(stride);
  const int64_t first = std::max(floor_div(distance - a.extent, stride) + 1, 1 - rows_b);
  const int64_t last = std::min(-floor_div(-distance - b.extent, stride) - 1, rows_a - 1);
  if (last > first + 1) return true;
  for (int64_t between = first; between <= last; ++between) {
    if (meet(a, b, distance - between * stride)) return true;
  }
  return false;
}

}  // namespace photon::ops
