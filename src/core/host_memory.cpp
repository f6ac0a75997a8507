// SPDX-License-Identifier: Apache-2.0
#include "core/host_memory.h"

#include <fstream>
#include <string>

namespace metrale {

Result<HostMemory> read_host_memory() {
  std::ifstream file("/proc/meminfo");
  HostMemory memory;
  std::string key;
  std::string rest;
  std::uint64_t kib = 0;
  while (file >> key >> kib) {
    if (key == "MemTotal:") memory.total = kib << 10;
    if (key == "MemAvailable:") memory.available = kib << 10;
    std::getline(file, rest);
  }
  if (memory.total == 0) return Error(Errc::io, "read /proc/meminfo: it has no line MemTotal");
  return memory;
}

}  // namespace metrale
