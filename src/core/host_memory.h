// SPDX-License-Identifier: Apache-2.0
//
// How much memory the host has, as its kernel counts. Any thread.
#pragma once

#include <cstdint>

#include "metrale/result.h"

namespace metrale {

/// In bytes.
struct HostMemory {
  std::uint64_t total = 0;
  std::uint64_t available = 0;  ///< What programs can have without swapping.
};

/// Reads /proc/meminfo. Errors: io. Throws bad_alloc only.
Result<HostMemory> read_host_memory();

}  // namespace metrale
