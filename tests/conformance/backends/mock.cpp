// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/host_kernels.h"
#include "conformance/backends/options.h"
#include "conformance/test_kernels.h"

namespace metrale::conformance {

mock::Options mock_options(const CreateOptions& options) {
  mock::Options made;
  made.face = options.face;
  if (options.memory_limit_bytes) made.total_memory_bytes = made.free_memory_bytes = *options.memory_limit_bytes;
  made.without = options.without;
  return made;
}

void teach(mock::MockControl& control) {
  for (const host::HostKernel& k : host_test_kernels()) {
    KernelFacts facts;
    facts.param_bytes.assign(k.param_bytes.begin(), k.param_bytes.end());
    facts.n_tile = k.n_tile;
    facts.casts_a_to_e4m3 = k.casts_a_to_e4m3;
    facts.waits_for_dependency = k.waits_for_dependency;
    control.set_kernel_facts(k.module, k.function, facts);
  }
  for (const std::string_view module : {"no_such_module", ""}) control.mark_module_absent(module);
  for (const std::string_view function : {"no_such_function", "absent", "absent_a", "absent_b", "another", "optional",
                                          "optional_early", "optional_late", "required"}) {
    control.deny_kernel(kModule, function);
  }
}

BackendUnderTest mock_under_test() {
  BackendUnderTest backend;
  backend.name = "mock";
  backend.create = [](const CreateOptions& options) -> Result<std::unique_ptr<GpuBackend>> {
    auto made = METRALE_TRY(mock::create(mock_options(options)));
    teach(mock::control(*made));
    return made;
  };
  backend.fills_pattern = true;
  backend.limits_memory = true;
  backend.drops_capabilities = true;
  return backend;
}

}  // namespace metrale::conformance
