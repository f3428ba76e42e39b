// What went wrong, in words.
#include <cstdarg>
#include <cstdio>
#include <map>

#include "machine.h"

namespace emulator {

std::string format(const char* pattern, ...) {
  char buffer[1024];
  va_list values;
  va_start(values, pattern);
  std::vsnprintf(buffer, sizeof(buffer), pattern, values);
  va_end(values);
  return buffer;
}

std::string at(const Site& site) { return format("at %s:%d", site.file, site.line); }

std::string thread_name(const Thread& thread) {
  const Extent& block = thread.warp->block->index;
  const Extent& size = machine.launch->block;
  const unsigned number = thread.index.x + size.x * (thread.index.y + size.y * thread.index.z);
  return block.y + block.z == 0
             ? format("thread %u of block %u", number, block.x)
             : format("thread %u of block (%u, %u, %u)", number, block.x, block.y, block.z);
}

std::string deadlock_message() {
  constexpr size_t kMaxLines = 12;
  struct Group {
    unsigned first, last;
    size_t count;
    std::string where;
  };
  std::string message = "no thread can go on:";
  for (const Block& block : machine.blocks) {
    std::map<std::string, Group> groups;
    const Thread* threads = machine.warps[block.first_warp].threads;
    for (unsigned i = 0; i < static_cast<unsigned>(block.threads); ++i) {
      const Wait& wait = threads[i].wait;
      const std::string what = threads[i].ended
                                   ? "ended"
                                   : format("at %s %s: ", wait.name, at(wait.site).c_str()) +
                                         wait.describe(wait.subject);
      Group& group = groups.try_emplace(what, Group{i, i, 0, what}).first->second;
      group.last = i;
      ++group.count;
    }
    size_t lines = 0;
    for (const auto& [what, group] : groups) {
      if (++lines > kMaxLines) {
        message += format("\n  and %zu other places", groups.size() - kMaxLines);
        break;
      }
      message += format("\n  block %u, %zu threads from %u to %u: ", block.index.x, group.count,
                        group.first, group.last) +
                 what;
    }
  }
  return message;
}

}  // namespace emulator
