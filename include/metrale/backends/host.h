// SPDX-License-Identifier: Apache-2.0
//
// The host backend: the CPU as a device. Streams run on threads of their own, events order them, graphs record and replay, kernels
// are the C++ functions it is created with. Device memory is host memory, so the device is an integrated one, and a host address is
// its own device alias. It is the default where no GPU is found and the oracle for numerics. A copy to or from it may run during
// the call when the stream is idle. A kernel that faults or throws loses the device;
// work behind it is dropped, host functions included.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "metrale/backend.h"
#include "metrale/backends/host_kernel.h"

namespace metrale::host {

struct Options {
  FaceOptions face;
  /// Threads that run the blocks of a grid, the stream's own included; 0: METRALE_HOST_THREADS,
  /// at most four for each core, else one for each core.
  std::uint32_t num_threads = 0;
  /// Kernel tables to serve; a later table replaces an earlier kernel of the same name. The tables outlive the backend.
  std::vector<std::span<const HostKernel>> kernels;
  /// Globals of the modules; a later one replaces an earlier one of the same name.
  std::vector<std::span<const HostSymbol>> symbols;
  /// Bytes that allocations, pinned ones included, may take in all; 0: what the machine has.
  std::uint64_t memory_limit_bytes = 0;
};

/// Makes a backend, a device of its own. Errors: invalid_argument (a kernel without function), out_of_memory, internal.
Result<std::unique_ptr<GpuBackend>> create(Options options = {});

}  // namespace metrale::host
