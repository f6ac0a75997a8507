// SPDX-License-Identifier: Apache-2.0
//
// The backends of this build, by name. A backend that was not built is absent from the table. The table is constant and holds no
// device state; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/backends/cuda_module.h"
#include "metrale/backends/host_kernel.h"
#include "metrale/result.h"

namespace metrale {

/// What a backend of the table is created with.
struct BackendOptions {
  FaceOptions face;
  /// As `host::Options::num_threads`.
  std::uint32_t host_threads = 0;
  /// Kernel tables of the host backend; they outlive it.
  std::vector<std::span<const host::HostKernel>> host_kernels;
  /// Kernel modules of the CUDA backend; their bytes outlive it.
  std::vector<cuda::ModuleImage> cuda_modules;
  /// Device of the CUDA backend; none: METRALE_CUDA_DEVICE, else the first.
  std::optional<int> cuda_device;
};

/// One row of the table.
struct BackendInfo {
  std::string_view name;         ///< "cuda", "host", "mock".
  std::string_view description;  ///< One line.
  bool computes = false;         ///< Whether kernels run; only such a backend is chosen by "auto".
  /// Why this machine cannot run it, one line; nullopt when it can.
  std::optional<std::string> (*unavailable)() = nullptr;
  Result<std::unique_ptr<GpuBackend>> (*create)(const BackendOptions& options) = nullptr;
};

/// Every backend of this build, the one to prefer first.
std::span<const BackendInfo> backends() noexcept;
/// The row of `name`; null when it was not built.
const BackendInfo* find_backend(std::string_view name) noexcept;

/// Makes a backend by name; "auto" takes the first that computes and that this machine can run.
/// Errors: not_found (not built: names those that are), unsupported (not on this machine, with the reason),
///   and those of the backend.
Result<std::unique_ptr<GpuBackend>> create_backend(std::string_view name, const BackendOptions& options = {},
                                                   std::source_location site = std::source_location::current());

}  // namespace metrale
