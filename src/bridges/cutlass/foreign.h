// SPDX-License-Identifier: Apache-2.0
//
// The one translation of codes of CUDA's runtime and of CUTLASS.
#pragma once

#include <source_location>

#include "bridges/cutlass/launch.h"
#include "metrale/result.h"

namespace metrale::cutlass {

/// `foreign` as a Result: a shape that CUTLASS cannot do and code that is not there are unsupported, memory that is short is
/// out_of_memory, and the rest is internal. Whether the device is lost is what the backend finds out behind it.
Result<> translate(const Foreign& foreign, std::source_location site = std::source_location::current());

}  // namespace metrale::cutlass
