// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/host_kernels.h"
#include "conformance/backends/options.h"

namespace metrale::conformance {

host::Options host_options(const CreateOptions& options) {
  host::Options made;
  made.face = options.face;
  made.kernels = {host_test_kernels()};
  made.symbols = {host_test_symbols()};
  made.memory_limit_bytes = options.memory_limit_bytes.value_or(0);
  return made;
}

BackendUnderTest host_under_test() {
  BackendUnderTest backend;
  backend.name = "host";
  backend.create = [](const CreateOptions& options) { return host::create(host_options(options)); };
  backend.fills_pattern = true;
  backend.limits_memory = true;
  backend.foreign_memory = [](std::uint64_t bytes) {
    static std::vector<std::vector<std::byte>> kept;
    return DevicePtr{reinterpret_cast<std::uintptr_t>(kept.emplace_back(bytes).data())};
  };
  return backend;
}

}  // namespace metrale::conformance
