// Float32 working memory of the calling thread: kept between calls and grown when a call needs
// more, so that a steady step allocates nothing.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace photon::cpu {

class Scratch {
 public:
  // At least `size` floats, contents undefined, valid until the next call. Throws std::bad_alloc.
  float* floats(int64_t size) {
    if (size > size_) {
      data_.reset();  // before the new one: the two need never exist together
      size_ = 0;
      data_.reset(static_cast<float*>(
          ::operator new(static_cast<size_t>(size) * sizeof(float), kAlignment)));
      size_ = size;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};  // whole vectors in whole cache lines
  struct Free {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

}  // namespace photon::cpu
