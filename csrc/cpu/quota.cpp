#include "cpu/quota.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace photon::cpu {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

double cores(double quota, double period) {
  return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// "max 100000" or "150000 100000": microseconds of processor time a period, and the period.
double quota_v2(const std::string& directory) {
  double quota = 0, period = 0;
  std::ifstream file(directory + "/cpu.max");
  return file >> quota >> period ? cores(quota, period) : kUnlimited;  // "max" is no number
}

// The quota is -1 where there is none.
double quota_v1(const std::string& directory) {
  double quota = 0, period = 0;
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us"),
      period_file(directory + "/cpu.cfs_period_us");
  return quota_file >> quota && period_file >> period ? cores(quota, period) : kUnlimited;
}

// The smallest quota of a group and the groups around it. In a container the path may be the
// host's, and only the mount itself exist.
template <typename Quota>
double smallest(const std::string& mount, std::string path, const Quota& quota) {
  double least = quota(mount);
  while (path.size() > 1) {
    least = std::min(least, quota(mount + path));
    path.resize(path.rfind('/'));
  }
  return least;
}

bool lists_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

}  // namespace

int quota_cores(const std::string& groups, const std::string& mount) {
  double least = kUnlimited;
  std::ifstream file(groups);
  for (std::string token;
       std::getline(file, token);) {  // "id:controllers:/path"; version 2 names no controllers
    std::istringstream fields(token);
    std::string id, controllers, path;
    std::getline(std::getline(std::getline(fields, id, ':'), controllers, ':'), path);
    if (path.empty() || path[0] != '/') continue;
    if (controllers.empty()) least = std::min(least, smallest(mount, path, quota_v2));
    if (lists_cpu(controllers)) least = std::min(least, smallest(mount + "/cpu", path, quota_v1));
  }
  if (least == kUnlimited) return 0;
  return static_cast<int>(std::clamp(std::floor(least), 1.0, 1e6));
}

}  // namespace photon::cpu
