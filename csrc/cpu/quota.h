// How much processor time this process is given: containers limit it by a quota of their control
// group, not by taking cores away.
#pragma once
#include <string>

namespace photon::cpu {

// The whole cores that the quotas of a process's control groups amount to, at least 1; 0: no quota.
// The smallest along the path to the root counts. A fraction of a core is left to the threads
// around the kernels.
//
// `groups` is the process's list of groups (/proc/self/cgroup), `mount` is where their file systems
// are (/sys/fs/cgroup). Reads cpu.max (version 2) and cpu.cfs_quota_us (version 1); what cannot be
// read sets no limit.
int quota_cores(const std::string& groups, const std::string& mount);

}  // namespace photon::cpu
