// SPDX-License-Identifier: Apache-2.0
#include "backends/host/module.h"

#include <fmt/format.h>

#include "backends/host/host_backend.h"
#include "backends/host/status.h"

namespace metrale::host {

Modules::Modules(std::span<const std::span<const HostKernel>> kernels, std::span<const std::span<const HostSymbol>> symbols) {
  for (const auto& table : kernels) {
    for (const HostKernel& kernel : table) {
      kernels_[{kernel.module, kernel.function}] = &kernel;
      modules_.insert(kernel.module);
    }
  }
  for (const auto& table : symbols) {
    for (const HostSymbol& symbol : table) {
      symbols_[{symbol.module, symbol.name}] = &symbol;
      modules_.insert(symbol.module);
    }
  }
}

Result<const HostKernel*> Modules::find(std::string_view module, std::string_view function) const {
  if (const auto it = kernels_.find({module, function}); it != kernels_.end()) return it->second;
  if (has_module(module)) {
    std::string others;
    for (auto it = kernels_.lower_bound({module, ""}); it != kernels_.end() && it->first.first == module; ++it) {
      others += others.empty() ? "" : ", ";
      others += it->first.second;
    }
    return Error(Errc::not_found, fmt::format("no kernel '{}' in host module '{}', which has: {}", function, module, others));
  }
  return Error(Errc::not_found, fmt::format("no host module '{}' for kernel '{}'; {} modules were given at creation", module,
                                            function, modules_.size()));
}

const HostKernel* Modules::first_broken() const {
  for (const auto& [name, kernel] : kernels_) {
    if (kernel->fn == nullptr) return kernel;
  }
  return nullptr;
}

Result<std::vector<KernelRegistry::Entry>> Modules::entries() const {
  return guarded("list kernels", [&]() -> Result<std::vector<Entry>> {
    std::vector<Entry> entries;
    entries.reserve(kernels_.size());
    for (const auto& [name, kernel] : kernels_) {
      entries.push_back({std::string(name.first), std::string(name.second), facts_of(*kernel)});
    }
    return entries;
  });
}

Result<DeviceSymbol> Modules::device_symbol(std::string_view module, std::string_view name, std::source_location site) {
  const auto it = symbols_.find({module, name});
  if (it == symbols_.end()) return Error(Errc::not_found, fmt::format("no global '{}' in host module '{}'", name, module), site);
  return DeviceSymbol{{reinterpret_cast<std::uintptr_t>(it->second->address)}, it->second->bytes};
}

KernelFacts facts_of(const HostKernel& kernel) {
  return {.param_bytes = {kernel.param_bytes.begin(), kernel.param_bytes.end()},
          .n_tile = kernel.n_tile,
          .casts_a_to_e4m3 = kernel.casts_a_to_e4m3,
          .waits_for_dependency = kernel.waits_for_dependency};
}

// ---- hooks ----

Result<NativeKernel> HostBackend::do_find_kernel(std::string_view module, std::string_view function) {
  METRALE_TRY(device().alive());
  return guarded("find a kernel", [&]() -> Result<NativeKernel> {
    const HostKernel* kernel = METRALE_TRY(modules_.find(module, function));
    return NativeKernel{reinterpret_cast<std::uintptr_t>(kernel)};
  });
}

Result<bool> HostBackend::do_has_module(std::string_view module) {
  METRALE_TRY(device().alive());
  return modules_.has_module(module);
}

Result<KernelFacts> HostBackend::do_kernel_facts(NativeKernel kernel) {
  METRALE_TRY(device().alive());
  return guarded("read kernel facts", [&]() -> Result<KernelFacts> { return facts_of(kernel_of(kernel)); });
}

KernelRegistry* HostBackend::do_kernel_registry() noexcept { return &modules_; }

// Kernels are part of the program, so there is nothing to unload; they can be found again.
Result<> HostBackend::do_unload_modules() { return {}; }

}  // namespace metrale::host
