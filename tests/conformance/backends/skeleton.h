// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/backend_under_test.h"

namespace metrale::conformance {

/// The skeleton that docs/adding-a-backend.md begins with. Known to the test program only.
BackendUnderTest skeleton_under_test();

}  // namespace metrale::conformance
