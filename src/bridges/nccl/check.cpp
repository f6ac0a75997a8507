// SPDX-License-Identifier: Apache-2.0
#include "bridges/nccl/check.h"

#include <fmt/format.h>

#include <algorithm>

namespace metrale::nccl {

Result<> check_rank(std::uint32_t rank, std::uint32_t size, const Options& options, std::source_location site) {
  if (size == 0 || size > kMaxProcesses || rank >= size)
    return Error(Errc::invalid_argument, fmt::format("rank {} of {}; 1 to {} ranks can be had", rank, size, kMaxProcesses), site);
  if (options.meeting_timeout.count() <= 0 || options.timeout.count() <= 0) {
    return Error(
        Errc::invalid_argument,
        fmt::format("timeouts of {} and {} ms; give the ranks time", options.meeting_timeout.count(), options.timeout.count()),
        site);
  }
  return {};
}

Result<> check_backend(const GpuBackend& backend, std::source_location site) {
  if (backend.name() == "cuda" && backend.capabilities().has(Capability::native_work)) return {};
  return Error(Errc::unsupported,
               fmt::format("NCCL works on CUDA devices, and this is the {} backend; ranks of one process on the "
                           "host meet by in_process::create",
                           backend.name()),
               site);
}

Result<> check_world(std::span<GpuBackend* const> backends, const Options& options, std::source_location site) {
  if (backends.empty()) return Error(Errc::invalid_argument, "a world of 0 ranks; give one backend for each", site);
  METRALE_TRY(check_rank(0, static_cast<std::uint32_t>(std::min<std::size_t>(backends.size(), kMaxProcesses + 1)), options, site));
  for (std::size_t i = 0; i < backends.size(); ++i) {
    if (backends[i] == nullptr) return Error(Errc::invalid_argument, fmt::format("the backend of rank {} is null", i), site);
    if (std::ranges::count(backends.first(i), backends[i]) != 0)
      return Error(Errc::invalid_argument, fmt::format("rank {} has the backend of another rank; each needs its own", i), site);
    METRALE_TRY(check_backend(*backends[i], site));
  }
  return {};
}

}  // namespace metrale::nccl
