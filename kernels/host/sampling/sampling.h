// SPDX-License-Identifier: Apache-2.0
//
// Host kernels of module "sampling" (metrale/models/sampling_kernels.h). Any thread.
#pragma once

#include <span>

#include "metrale/backends/host_kernel.h"
#include "metrale/models/sampling_kernels.h"

namespace metrale::host::sampling {

/// The table. Lifetime: static.
std::span<const HostKernel> kernels() noexcept;

}  // namespace metrale::host::sampling
