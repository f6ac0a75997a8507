// SPDX-License-Identifier: Apache-2.0
//
// Modules: what a backend loaded into its context, and what is found in it. Every method is called with that context current. Owns
// the CUmodules until `unload`; look-ups from any thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/driver.h"
#include "metrale/backends/cuda.h"
#include "metrale/kernel_registry.h"

namespace metrale::cuda {

/// A kernel that was found. Stays at its address until modules are unloaded.
struct Kernel {
  CUfunction function = nullptr;
  KernelFacts facts;
  std::vector<std::uint32_t> param_offsets;       ///< Of each argument in the parameter buffer, in bytes.
  std::uint32_t static_shared_bytes = 0;
  std::uint32_t max_threads = 0;                  ///< Of a block.
  std::string name;                               ///< "module.function"
};

class Modules final : public KernelRegistry {
 public:
  Modules(const Driver& driver, CUdevice device) : driver_(driver), device_(device) {}
  ~Modules() override;

  /// Loads every image. `warm`: every kernel too, so that no launch loads code.
  /// Errors: bad_format (an image that this device cannot run: names both architectures), and those of the driver; nothing stays loaded.
  Result<> load(std::span<const ModuleImage> images, bool warm);
  /// Drops every module. Kernels found before are gone.
  Result<> unload() noexcept;
  bool has_module(std::string_view module) const;
  /// Errors: not_found.
  Result<const Kernel*> find(std::string_view module, std::string_view function);

  Result<std::vector<Entry>> entries() const override;
  Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name, std::source_location site) override;

 private:
  const Driver& driver_;
  CUdevice device_;
};

}  // namespace metrale::cuda
