// SPDX-License-Identifier: Apache-2.0
//
// The kernels that metrale brings for the host backend: matrix products and what the reference decoders need beside them. Tables
// are static; any thread.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "metrale/backends/host_kernel.h"

namespace metrale::host {

/// Every kernel table, for the strongest instruction set that this machine runs and METRALE_HOST_ISA allows. Goes into
/// `Options::kernels` or `BackendOptions::host_kernels`.
std::vector<std::span<const HostKernel>> kernel_tables();

/// The instruction set of those kernels: "generic", "avx2", "avx512" or "amx".
std::string_view kernel_isa();

}  // namespace metrale::host
