// Error messages: text("launch: input_words is ", 300, ", the buffer holds ", 256).
#pragma once
#include <sstream>
#include <string>

namespace photon::device {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace photon::device
