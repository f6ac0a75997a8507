// SPDX-License-Identifier: Apache-2.0
//
// The host backend: the CPU as a device. Streams are threads, events order them, graphs record and replay, kernels are the C++ functions
// it is created with. Device memory is host memory. It is the default where no GPU is found and the oracle for numerics.
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
  /// Threads that run the blocks of a grid, the stream's own included; 0: one for each core.
  std::uint32_t num_threads = 0;
  /// Kernel tables to serve; a later table replaces an earlier kernel of the same name. The tables outlive the backend.
  std::vector<std::span<const HostKernel>> kernels;
  /// Bytes that allocations may take in all; 0: what the machine has.
  std::uint64_t memory_limit_bytes = 0;
};

/// Makes a backend. Errors: out_of_memory, internal (no thread could be started).
Result<std::unique_ptr<GpuBackend>> create(Options options = {});

}  // namespace metrale::host
