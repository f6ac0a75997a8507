// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "backends/mock/mock_backend.h"

namespace metrale::mock {

Result<NativeKernel> MockBackend::do_find_kernel(std::string_view module, std::string_view function) {
  METRALE_TRY(enter({.op = Op::kernel}));
  return host::guarded("find a kernel", [&]() -> Result<NativeKernel> {
    const MockControl::State::Name name{module, function};
    std::lock_guard lock(state().mutex);
    const bool is_found = !state().absent_modules.contains(module) && !state().denied.contains(name);
    if (state().is_recording.load(std::memory_order_relaxed)) state().lookups.push_back({name.first, name.second, is_found});
    if (!is_found)
      return Error(Errc::not_found, fmt::format("the mock was told to have no kernel '{}' in module '{}'", function, module));
    std::unique_ptr<MockKernel>& kernel = state().kernels[name];
    if (kernel == nullptr) kernel = std::make_unique<MockKernel>(MockKernel{name.first, name.second});
    return NativeKernel{reinterpret_cast<std::uintptr_t>(kernel.get())};
  });
}

Result<bool> MockBackend::do_has_module(std::string_view module) {
  METRALE_TRY(enter(Op::has_module));
  std::lock_guard lock(state().mutex);
  return !state().absent_modules.contains(module);
}

Result<KernelFacts> MockBackend::do_kernel_facts(NativeKernel kernel) {
  METRALE_TRY(state().enter_step());
  return host::guarded("read kernel facts", [&]() -> Result<KernelFacts> {
    const MockKernel& k = mock_kernel(kernel);
    std::lock_guard lock(state().mutex);
    const auto it = state().facts.find({k.module, k.function});
    if (it != state().facts.end()) return it->second;
    KernelFacts unknown;
    unknown.takes_any_arguments = true;
    unknown.waits_for_dependency = true;
    return unknown;
  });
}

Result<> MockBackend::do_unload_modules() { return enter({.op = Op::unload_modules}); }

}  // namespace metrale::mock
