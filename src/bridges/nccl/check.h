// SPDX-License-Identifier: Apache-2.0
//
// What of a world of ranks can be refused without library and device.
#pragma once

#include <cstdint>
#include <span>

#include "metrale/bridges/nccl.h"

namespace metrale::nccl {

Result<> check_rank(std::uint32_t rank, std::uint32_t size, const Options& options, std::source_location site);
Result<> check_backend(const GpuBackend& backend, std::source_location site);
Result<> check_world(std::span<GpuBackend* const> backends, const Options& options, std::source_location site);

}  // namespace metrale::nccl
