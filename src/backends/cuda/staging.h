// SPDX-License-Identifier: Apache-2.0
//
// Where the sources of small copies to the device are put, so that the caller may use them again at once: each stream has an open
// block of pinned memory and a place in it. Guarded by its mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace metrale::cuda {

struct StagingCursor {
  std::mutex mutex;
  std::byte* block = nullptr;  ///< Of the backend's pinned pool.
  std::uint64_t used = 0;
};

}  // namespace metrale::cuda
