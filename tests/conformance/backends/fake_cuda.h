// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/backend_under_test.h"

namespace metrale::conformance {

/// The CUDA backend on a driver without a GPU. Known to the test program only.
BackendUnderTest fake_cuda_under_test();

}  // namespace metrale::conformance
