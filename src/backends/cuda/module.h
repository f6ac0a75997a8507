// SPDX-License-Identifier: Apache-2.0
//
// Modules: what a backend loads into its context, and what is found in it. Made with that context current; methods make it current
// where they call the driver, so any thread may call them. Owns the CUmodules until `unload` or its end, which must come before
// the context's.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cuda/driver.h"
#include "backends/cuda/kernel_path.h"
#include "metrale/backends/cuda_module.h"
#include "metrale/kernel_registry.h"
#include "metrale/switches.h"

namespace metrale::cuda {

/// A kernel of a loaded module. Stays at its address until modules are unloaded. Once found, its code is on the device.
struct Kernel {
  CUfunction function = nullptr;
  KernelFacts facts;
  std::vector<std::uint32_t> param_offsets;    ///< Of each argument in the parameter buffer, in bytes.
  std::uint32_t static_shared_bytes = 0;       ///< Known once found.
  std::uint32_t max_dynamic_shared_bytes = 0;  ///< What a launch may ask for; opted in when the code was loaded.
  std::uint32_t max_threads = 0;               ///< Of a block; known once found.
  std::string name;                            ///< "module.function"
  std::uint32_t module_chars = 0;              ///< Length of the module's part of `name`.
  std::atomic<bool> loaded{false};             ///< Its code, by this class.

  std::string_view module() const noexcept { return std::string_view(name).substr(0, module_chars); }
  std::string_view entry() const noexcept { return std::string_view(name).substr(module_chars + 1); }
};

class Modules final : public KernelRegistry {
 public:
  /// `kernel_path`: a folder as METRALE_KERNEL_PATH names one; empty for none.
  Modules(const Driver& driver, CUdevice device, std::string kernel_path = switches().kernel_path)
      : driver_(driver), device_(device), kernel_path_(std::move(kernel_path)) {}
  ~Modules() override;

  /// Takes the images, of which a later one replaces an earlier one of the same name, adds those of the kernel path, and loads them
  /// all. `warm`: the code of every kernel too, so that no look-up and no launch loads any. Call it once.
  /// Errors: bad_format (an image without code for this device: names both architectures), not_found, io and bad_format for the
  ///   kernel path, and those of the driver; nothing stays loaded.
  Result<> load(std::span<const ModuleImage> images, bool warm);
  /// Drops every module: kernels found before are gone. The next look-up loads them again.
  Result<> unload() noexcept;
  /// Drops the bookkeeping and calls no driver: for a forked child.
  void forget() noexcept;

  bool has_module(std::string_view module) const noexcept;
  /// Errors: not_found, and those of the driver where it has to load.
  Result<const Kernel*> find(std::string_view module, std::string_view function);

  Result<std::vector<Entry>> entries() const override;
  LoadReport load_report() const override;
  Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name, std::source_location site) override;

 private:
  struct Source {
    std::span<const std::byte> image;
    std::string origin;
  };
  struct Loaded {
    CUmodule handle = nullptr;
    LoadReport::Module report;
  };
  using Key = std::pair<std::string_view, std::string_view>;  // of the kernel's own name

  Result<> load_all();
  Result<> load_module(const std::string& name, const Source& source);
  Result<CUmodule> load_image(const std::string& name, const Source& source);
  Result<> add_kernels(const std::string& name, CUmodule handle, std::uint32_t& count);
  Result<> read_signature(Kernel& kernel);
  Result<> read_published(const std::string& module, CUmodule handle, std::span<Kernel* const> kernels);
  Result<> load_code(Kernel& kernel);
  /// Unloads what is loaded, and gives the first failure.
  Result<> drop_all() noexcept;
  /// Loads again what `unload` dropped. Called with no lock held.
  Result<> ensure_loaded();
  Error missing(std::string_view module, std::string_view function) const;

  const Driver& driver_;
  const CUdevice device_;
  const std::string kernel_path_;
  CUcontext context_ = nullptr;
  int major_ = 0;
  int minor_ = 0;
  std::uint32_t max_shared_bytes_ = 0;  // of a block that opted in
  bool warm_ = false;
  std::vector<KernelFile> files_;                       // bytes that `sources_` refer to
  std::map<std::string, Source, std::less<>> sources_;  // constant after `load`
  mutable std::shared_mutex mutex_;                     // of what follows
  bool is_loaded_ = false;
  std::map<std::string, Loaded, std::less<>> loaded_;
  std::map<Key, std::unique_ptr<Kernel>> kernels_;
  std::mutex code_mutex_;  // one lazy load at a time
  std::atomic<std::uint64_t> num_lazy_loads_{0};
};

}  // namespace metrale::cuda
