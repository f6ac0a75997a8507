// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend: one NVIDIA GPU through the driver, which is found at run time, so a program that has this backend starts on a
// machine without one. Each backend retains the primary context of its device and loads its own modules. Several backends, of one
// device or of several, live in one process. `create` may be called from any thread.
//
// The driver may run functions given to `enqueue_host` one after the other, whatever their streams: one that waits holds the
// others.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "metrale/backend.h"
#include "metrale/backends/cuda_module.h"
#include "metrale/result.h"

namespace metrale::cuda {

struct Options {
  FaceOptions face;
  /// The device, as the driver counts those that CUDA_VISIBLE_DEVICES leaves.
  int ordinal = 0;
  /// Modules to serve; a later one replaces an earlier one of the same name. METRALE_KERNEL_PATH may replace or add more.
  std::vector<ModuleImage> modules;
  /// Load every module and kernel at creation, so that nothing is loaded in the first step. See
  /// `KernelRegistry::load_report`.
  bool warm = true;
};

/// Why this machine cannot run the backend: each library name that was tried with the loader's words, or a driver that is too old,
/// or no device; nullopt when it can. Initialises the driver once a process.
std::optional<std::string> unavailable();

/// Makes a backend.
/// Errors: unsupported (as `unavailable`), invalid_argument (no such device: names those there are), bad_format (a module that this
///   device cannot load: names both architectures), not_found and io (METRALE_KERNEL_PATH), device_lost (this process lost it
///   before), out_of_memory, internal.
Result<std::unique_ptr<GpuBackend>> create(const Options& options = {});

}  // namespace metrale::cuda
