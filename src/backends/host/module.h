// SPDX-License-Identifier: Apache-2.0
//
// The modules of a host backend: tables of kernels and globals, merged by name. Constant after construction; any thread.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "metrale/backends/host_kernel.h"
#include "metrale/kernel_registry.h"

namespace metrale::host {

class Modules final : public KernelRegistry {
 public:
  Modules(std::span<const std::span<const HostKernel>> kernels, std::span<const std::span<const HostSymbol>> symbols);

  Result<const HostKernel*> find(std::string_view module, std::string_view function) const;
  bool has_module(std::string_view module) const { return modules_.count(module) != 0; }
  /// The first kernel without a function, or null.
  const HostKernel* first_broken() const;

  Result<std::vector<Entry>> entries() const override;
  Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name, std::source_location site) override;

 private:
  using Name = std::pair<std::string_view, std::string_view>;
  std::map<Name, const HostKernel*> kernels_;
  std::map<Name, const HostSymbol*> symbols_;
  std::set<std::string_view> modules_;
};

KernelFacts facts_of(const HostKernel& kernel);

}  // namespace metrale::host
