// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "metrale/kernel_registry.h"

namespace metrale {

std::uint64_t KernelAudit::num_required_missing() const noexcept {
  return static_cast<std::uint64_t>(
      std::count_if(misses.begin(), misses.end(), [](const LookupMiss& m) { return !m.declared_absent; }));
}

}  // namespace metrale
