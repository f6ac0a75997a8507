// SPDX-License-Identifier: Apache-2.0
//
// The kernels that metrale brings for the CUDA backend, compiled into this program. Static tables, any thread; needs neither a
// driver nor a device.
#pragma once

#include <span>
#include <string_view>

#include "metrale/backends/cuda_module.h"

namespace metrale::cuda {

/// Every module of this build, sorted by name; none in a build without nvcc. Goes into `Options::modules` or
/// `BackendOptions::cuda_modules`.
std::span<const ModuleImage> kernel_modules();

/// What they were compiled for, as METRALE_CUDA_TARGETS has it: "common sm_90a". "common" is code for sm_80 with PTX for any later
/// device. Empty in a build without nvcc.
std::string_view kernel_targets();

}  // namespace metrale::cuda
