// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "conformance/backend_under_test.h"

namespace metrale::conformance {

/// Backends that show what the suite makes of exclusions, of a machine without the device, and of a call that hangs. For tests of
/// the suite itself: the test program knows them when asked for one by name.
std::vector<BackendUnderTest> sample_backends();

}  // namespace metrale::conformance
