// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/samples.h"

#include <chrono>
#include <thread>

#include "conformance/mutants/host_mutant.h"

namespace metrale::conformance {
namespace {

class AllocHangs : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t, MemoryKind) override {
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
};

template <class T>
BackendUnderTest sample(std::string_view name) {
  BackendUnderTest backend = host_under_test();
  backend.name = name;
  backend.create = [](const CreateOptions& options) { return host::HostBackend::make<T>(host_options(options)); };
  return backend;
}

}  // namespace

std::vector<BackendUnderTest> sample_backends() {
  BackendUnderTest unavailable = host_under_test();
  unavailable.name = "sample_unavailable";
  unavailable.create = [](const CreateOptions&) -> Result<std::unique_ptr<GpuBackend>> {
    return Error(Errc::unsupported, "no such device here");
  };

  BackendUnderTest failing = sample<AllocZeroes>("sample_failing");
  failing.expected_failures = {{"Alloc.LeavesContentsThatAreNotZero", "fresh memory is zero, on purpose"}};
  failing.unsupported = {{"Memset.*", "left out, on purpose"}};

  BackendUnderTest passing = sample<HostMutant>("sample_passing");
  passing.expected_failures = failing.expected_failures;

  return {unavailable, failing, passing, sample<AllocHangs>("sample_hanging")};
}

}  // namespace metrale::conformance
