// SPDX-License-Identifier: Apache-2.0
#include "models/decoder/launch_plans.h"

#include <fmt/format.h>

namespace metrale::models {

std::uint64_t LaunchPlans::attend_scratch_bytes(std::uint32_t, std::uint32_t, std::uint32_t) const noexcept { return 0; }
LaunchShape LaunchPlans::rotate_attend(const RotateAttendParams&) const noexcept { return {}; }

Result<std::unique_ptr<LaunchPlans>> launch_plans(GpuBackend& backend) {
  if (backend.name() == "host") return host_plans(METRALE_TRY(backend.sm_count()));
  // The mock computes nothing and takes any geometry.
  if (backend.name() == "mock") return host_plans(1);
  if (backend.name() == "cuda") return cuda_plans(METRALE_TRY(backend.sm_count()));
  return Error(Errc::unsupported, fmt::format("the decoders have no kernels for backend {}; use cuda or host", backend.name()));
}

}  // namespace metrale::models
