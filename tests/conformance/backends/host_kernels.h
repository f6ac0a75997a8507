// SPDX-License-Identifier: Apache-2.0
//
// The host's build of the test kernels, and their facts for backends that only record. Static tables, any thread.
#pragma once

#include <span>

#include "metrale/backends/host_kernel.h"

namespace metrale::conformance {

std::span<const host::HostKernel> host_test_kernels();
std::span<const host::HostSymbol> host_test_symbols();

}  // namespace metrale::conformance
