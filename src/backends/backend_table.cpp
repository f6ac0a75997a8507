// SPDX-License-Identifier: Apache-2.0
//
// One row for each backend that this build has.
#include <fmt/format.h>

#include <array>

#include "metrale/backends.h"
#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"
#ifdef METRALE_WITH_CUDA
#include "metrale/backends/cuda.h"
#include "metrale/switches.h"
#endif

namespace metrale {

namespace {

std::optional<std::string> always_available() { return std::nullopt; }

Result<std::unique_ptr<GpuBackend>> create_host(const BackendOptions& options) {
  host::Options host;
  host.face = options.face;
  host.num_threads = options.host_threads;
  host.kernels = options.host_kernels;
  return host::create(std::move(host));
}

Result<std::unique_ptr<GpuBackend>> create_mock(const BackendOptions& options) {
  mock::Options mock;
  mock.face = options.face;
  return mock::create(std::move(mock));
}

#ifdef METRALE_WITH_CUDA
Result<std::unique_ptr<GpuBackend>> create_cuda(const BackendOptions& options) {
  cuda::Options cuda;
  cuda.face = options.face;
  cuda.ordinal = options.cuda_device.value_or(static_cast<int>(switches().cuda_device));
  cuda.modules = options.cuda_modules;
  return cuda::create(std::move(cuda));
}
#endif

constexpr std::array kTable{
#ifdef METRALE_WITH_CUDA
    BackendInfo{"cuda", "an NVIDIA GPU", true, cuda::unavailable, create_cuda},
#endif
    BackendInfo{"host", "the CPU as a device", true, always_available, create_host},
    BackendInfo{"mock", "records calls and computes nothing, for tests", false, always_available, create_mock},
};

std::string names_of_table() {
  std::string names;
  for (const BackendInfo& info : kTable) {
    names += names.empty() ? "" : ", ";
    names += info.name;
  }
  return names;
}

}  // namespace

std::span<const BackendInfo> backends() noexcept { return kTable; }

const BackendInfo* find_backend(std::string_view name) noexcept {
  for (const BackendInfo& info : kTable) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

Result<std::unique_ptr<GpuBackend>> create_backend(std::string_view name, const BackendOptions& options,
                                                   std::source_location site) {
  if (name == "auto") {
    for (const BackendInfo& info : kTable) {
      if (info.computes && !info.unavailable()) return info.create(options);
    }
    return Error(Errc::unsupported, fmt::format("no backend of this build ({}) can compute on this machine", names_of_table()),
                 site);
  }
  const BackendInfo* info = find_backend(name);
  if (info == nullptr) {
    return Error(Errc::not_found, fmt::format("backend '{}' is not built; this build has: {}", name, names_of_table()), site);
  }
  if (const std::optional<std::string> reason = info->unavailable()) {
    return Error(Errc::unsupported, fmt::format("backend '{}' cannot run on this machine: {}", name, *reason), site);
  }
  return info->create(options);
}

}  // namespace metrale
