// Tensor maps, and the boxes that tensor copies bring.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr cuuint32_t kMaxRank = 5, kMaxBox = 256, kMaxStep = 8;
constexpr cuuint64_t kMaxSize = cuuint64_t{1} << 32, kMaxStride = cuuint64_t{1} << 40;
constexpr size_t kVector = 16, kSwizzled = 128;  // bytes

cuuint32_t size_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
  }
  return 0;
}

// With the 128-byte swizzle bits 4 to 6 of an address are XORed with bits 7 to 9.
unsigned char* swizzled(unsigned char* place) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  return reinterpret_cast<unsigned char*>(address ^ (address >> 7 & 7u) * kVector);
}

}  // namespace

void check_tensor_map(const CUtensorMap* map, const char* name, Site site) {
  if (map->rank == 3) return;
  fail(format("%s: %s %s: what is at %p is not the map of a tensor of three dimensions",
              thread_name(*machine.current).c_str(), name, at(site).c_str(),
              static_cast<const void*>(map)));
}

uint32_t box_bytes(const CUtensorMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.element_bytes;
}

size_t box_alignment(const CUtensorMap& map) { return map.swizzled ? 1024 : 128; }

namespace {

// body(first byte or null, bytes of the box's line before it, bytes) for each line of a
// box; null where it lies outside of the tensor.
template <typename Body>
void for_lines(const CUtensorMap& map, const int (&begin)[3], const Body& body) {
  const auto size = [&](int dimension) { return static_cast<int64_t>(map.sizes[dimension]); };
  const int64_t column = begin[0], first = std::max<int64_t>(column, 0),
                last = std::min(column + map.box[0], size(0));
  for (uint32_t i = 0; i < map.box[1] * map.box[2]; ++i) {
    const int64_t row = begin[1] + int64_t{i % map.box[1]},
                  block = begin[2] + int64_t{i / map.box[1]};
    const bool is_inside =
        first < last && row >= 0 && row < size(1) && block >= 0 && block < size(2);
    const unsigned char* line = map.base + block * static_cast<int64_t>(map.strides[1]) +
                                row * static_cast<int64_t>(map.strides[0]);
    body(is_inside ? line + first * map.element_bytes : nullptr,
         static_cast<size_t>(is_inside ? first - column : 0) * map.element_bytes,
         static_cast<size_t>(is_inside ? last - first : 0) * map.element_bytes);
  }
}

}  // namespace

void check_box(const CUtensorMap& map, const int (&begin)[3]) {
  for_lines(map, begin, [](const unsigned char* from, size_t, size_t bytes) {
    if (from != nullptr) check_read(from, bytes);
  });
}

void land(const TensorCopy& copy) {
  const CUtensorMap& map = copy.map;
  const size_t line_bytes = size_t{map.box[0]} * map.element_bytes;
  unsigned char line[kMaxBox * 4];
  auto* place = static_cast<unsigned char*>(copy.shared);
  for_lines(map, copy.begin, [&](const unsigned char* from, size_t before, size_t bytes) {
    std::memset(line, 0, line_bytes);
    if (from != nullptr) std::memcpy(line + before, from, bytes);
    for (size_t at = 0; at < line_bytes; at += kVector, place += kVector) {
      std::memcpy(map.swizzled ? swizzled(place) : place, line + at, kVector);
    }
  });
}

}  // namespace emulator

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  using namespace emulator;
  const auto is_aligned = [](const void* pointer, size_t alignment) {
    return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
  };
  const cuuint32_t element_bytes = size_of(type);
  if (map == nullptr || !is_aligned(map, 64) || rank == 0 || rank > kMaxRank || base == nullptr ||
      !is_aligned(base, kVector)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  bool is_dense = true;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > kMaxSize || box[i] == 0 || box[i] > kMaxBox || steps[i] == 0 ||
        steps[i] > kMaxStep) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i + 1 < rank && (strides[i] % kVector != 0 || strides[i] >= kMaxStride))
      return CUDA_ERROR_INVALID_VALUE;
    is_dense = is_dense && steps[i] == 1;
  }
  const size_t line_bytes = size_t{box[0]} * element_bytes;
  const bool is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (line_bytes % kVector != 0 || (is_swizzled && line_bytes > kSwizzled))
    return CUDA_ERROR_INVALID_VALUE;
  const bool is_known =
      element_bytes != 0 && rank == 3 && is_dense && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
      fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
      (is_swizzled ? line_bytes == kSwizzled : swizzle == CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!is_known) return CUDA_ERROR_NOT_SUPPORTED;
  *map = {};
  map->base = static_cast<const unsigned char*>(base);
  std::copy(sizes, sizes + rank, map->sizes);
  std::copy(strides, strides + rank - 1, map->strides);
  std::copy(box, box + rank, map->box);
  map->rank = static_cast<unsigned char>(rank);
  map->element_bytes = static_cast<unsigned char>(element_bytes);
  map->swizzled = is_swizzled;
  return CUDA_SUCCESS;
}
