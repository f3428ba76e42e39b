// Whether views of memory share elements: arithmetic on sizes and strides alone, never on the
// elements, so that each call can ask.
#pragma once
#include <cstdint>

namespace photon::ops {

// The memory of a view that is not empty, in bytes: a run without gaps, repeated by dimensions with
// strides, the widest stride first.
class Footprint {
 public:
  static constexpr int64_t kMaxRank = 4;

  // Strides count elements and are not negative; `rank` is at most kMaxRank.
  Footprint(const int64_t* sizes, const int64_t* strides, int64_t rank, int64_t element_size);

  // Whether a stride is smaller than what it steps over. Views of a dense tensor by slicing,
  // selecting and transposing never are so.
  bool overlaps_itself() const;

  // Whether the two have a byte in common, `other` beginning `distance` bytes after this. It is
  // exact for views of one stride, such as columns of a matrix, and for those whose strides each
  // step over what the other repeats; what is more entangled counts as sharing.
  bool overlaps(const Footprint& other, int64_t distance) const;

 private:
  struct Dim {
    int64_t size, stride;
  };

  // What remains of a footprint inside of its widest dimensions.
  struct Block {
    const Dim* dims;
    int64_t rank;
    int64_t extent;  // from its first byte to behind its last

    int64_t widest() const { return rank == 0 ? 0 : dims->stride; }
    int64_t enter(int64_t stride);
  };

  static bool meet(Block a, Block b, int64_t distance);

  Dim dims_[kMaxRank];
  int64_t rank_ = 0;
  int64_t run_;     // bytes without a gap
  int64_t extent_;  // from the first byte to behind the last
};

}  // namespace photon::ops
