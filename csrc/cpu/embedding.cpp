// embedding and select_lines: copies of rows.
#include <cstring>

#include "common/line.h"
#include "common/segment.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace photon::cpu {
namespace {

constexpr int64_t kCopyGrainBytes = 256 * 1024;  // less is not worth waking a helper for

// out[i] = source(i), or zeros where source returns null.
template <typename Source>
void copy_lines(void* out, int64_t lines, int64_t line_bytes, int64_t out_stride_bytes, const Source& source) {
  if (line_bytes == 0) return;  // an empty tensor has no address to copy to
  const int64_t grain = 1 + kCopyGrainBytes / line_bytes;
  parallel_for(lines, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* to = static_cast<char*>(out) + i * out_stride_bytes;
      const char* from = source(i);
      if (from == nullptr) {
        std::memset(to, 0, static_cast<size_t>(line_bytes));
      } else {
        std::memcpy(to, from, static_cast<size_t>(line_bytes));
      }
    }
  });
}

}  // namespace

void embedding(const EmbeddingParams& p) {
  const int64_t size = size_of(p.dtype), line_bytes = p.hidden * size;
  copy_lines(p.out, p.num_lines, line_bytes, p.out_stride * size, [&](int64_t i) -> const char* {
    const int64_t token = embedded_token(p.decode_meta, i, p.vocab);
    return token < 0 ? nullptr : static_cast<const char*>(p.weight) + token * line_bytes;
  });
}

void select_lines(const SelectLinesParams& p) {
  const int64_t size = size_of(p.dtype);
  copy_lines(p.out, p.num_segments, p.hidden * size, p.out_stride * size, [&](int64_t r) -> const char* {
    const int64_t last = last_line(load_segment(p.segments, r), p.num_lines);
    return last < 0 ? nullptr : static_cast<const char*>(p.x) + last * p.x_stride * size;
  });
}

}  // namespace photon::cpu
