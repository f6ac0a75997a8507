// SPDX-License-Identifier: Apache-2.0
//
// The test kernels for GPUs, compiled into this program: one module named as `kModule`. Empty in a build without nvcc. A static
// table, any thread.
#pragma once

#include <span>

#include "metrale/backends/cuda_module.h"

namespace metrale::conformance {

std::span<const cuda::ModuleImage> cuda_test_modules();

}  // namespace metrale::conformance
