// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/backend_under_test.h"

namespace metrale::conformance {

/// The CUDA backend on a driver without a GPU, which has what an sm_90 has. Known to the test program only.
BackendUnderTest fake_cuda_under_test();
/// The same on one without clusters, dependent launch, tensor maps and managed memory.
BackendUnderTest fake_cuda_sm_80_under_test();

}  // namespace metrale::conformance
