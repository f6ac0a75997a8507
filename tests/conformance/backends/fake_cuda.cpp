// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "conformance/backends/host_kernels.h"
#include "conformance/test_kernels.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::conformance {
namespace {

constexpr std::uint64_t kTotalBytes = std::uint64_t{8} << 30;

/// Every block waits until all have come: only where they run at once.
void meet(const host::BlockContext& c) {
  const std::atomic_ref<std::uint32_t> counter(*c.ptr<std::uint32_t>(0));
  const auto blocks = static_cast<std::uint32_t>(c.grid.count());
  ++counter;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (counter.load() < blocks && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  c.ptr<std::uint32_t>(1)[c.index.x] = counter.load();
}

/// One for the whole run, as a real driver: backends that live at once share it.
struct Machine {
  Machine() {
    std::vector<host::HostKernel> kernels(host_test_kernels().begin(), host_test_kernels().end());
    for (host::HostKernel& kernel : kernels) {
      if (kernel.function == kMeet) kernel.fn = meet;
    }
    const std::vector<fake_cuda::Global> globals{{kSymbol, kSymbolBytes}};
    module = gpu.add_module(kModule, kernels, globals);
    static_cast<void>(gpu.driver().cuInit_(0));  // as load_driver does
  }
  fake_cuda::FakeGpu gpu{{.devices = {{}, {.compute_capability = 80, .managed_memory = false}}}};
  cuda::ModuleImage module;
};

Machine& machine() {
  static Machine instance;
  return instance;
}

BackendUnderTest on_device(std::string_view name, int ordinal) {
  BackendUnderTest backend;
  backend.name = name;
  backend.create = [ordinal](const CreateOptions& options) {
    Machine& on = machine();
    if (options.memory_limit_bytes) {
      on.gpu.set_total_memory(*options.memory_limit_bytes, ordinal);
    } else if (on.gpu.num_retains(ordinal) == 0) {
      on.gpu.set_total_memory(kTotalBytes, ordinal);
    }
    cuda::Options made;
    made.face = options.face;
    made.ordinal = ordinal;
    made.modules = {on.module};
    return cuda::create_with_driver(on.gpu.driver(), std::move(made));
  };
  backend.limits_memory = true;
  backend.packs_chunks = true;
  backend.foreign_memory = [](std::uint64_t bytes) { return DevicePtr{machine().gpu.foreign_memory(bytes)}; };
  backend.unsupported = {{"Lifecycle.HasItsNameAndIsHealthy", "it is the real backend, whose name is cuda"}};
  return backend;
}

}  // namespace

BackendUnderTest fake_cuda_under_test() { return on_device("fake_cuda", 0); }
BackendUnderTest fake_cuda_sm_80_under_test() { return on_device("fake_cuda_sm_80", 1); }

}  // namespace metrale::conformance
