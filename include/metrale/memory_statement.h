// SPDX-License-Identifier: Apache-2.0
//
// A statement of account for a backend's memory: what is held, what of it is explained, and the rest under its own name. A
// snapshot; taking it allocates nothing on the device. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metrale/backend.h"
#include "metrale/result.h"

namespace metrale {

struct MemoryStatement {
  struct Line {
    std::string what;
    std::uint64_t bytes = 0;
    std::uint64_t blocks = 0;
  };
  /// Disjoint parts that the backend can explain: by kind of memory, each library by its label, the pool's unused reserve.
  std::vector<Line> explained;
  /// The same blocks by owner label and by call site, largest first.
  std::vector<OwnerUse> owners;
  std::vector<SiteUse> sites;
  std::uint64_t explained_bytes = 0;
  /// What is held in all: used memory of a discrete device, resident memory of this process where the device shares the host's.
  std::uint64_t held_bytes = 0;
  std::string held_by;  ///< Whose figure that is.
  /// held - explained: contexts, modules, other processes on a discrete device; code, heap and stacks on a shared one, less blocks
  /// that were never touched, so it may be negative there.
  std::int64_t residual_bytes = 0;
  std::string residual_means;

  std::string to_string() const;
};

/// Draws up the statement for `backend` as it is now. Errors: as `GpuBackend::total_memory`.
Result<MemoryStatement> memory_statement(GpuBackend& backend);

}  // namespace metrale
