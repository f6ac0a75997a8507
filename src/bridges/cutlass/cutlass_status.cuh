// SPDX-License-Identifier: Apache-2.0
//
// CUTLASS's codes as the bridge's host code takes them.
#pragma once

#include <cutlass/cutlass.h>

#include "bridges/cutlass/launch.h"

namespace metrale::cutlass {

inline Foreign cutlass_status(::cutlass::Status code, const char* call) noexcept {
  if (code == ::cutlass::Status::kSuccess) return {};
  return {.origin = Foreign::Origin::cutlass,
          .code = static_cast<int>(code),
          .text = ::cutlass::cutlassGetStatusString(code),
          .call = call};
}

}  // namespace metrale::cutlass
